"""Faults that engines shipped, or nearly did, and the tests that must see them.

`make mutants` applies each to a copy of the tree; ``tests/test_mutants.py`` holds the
entries to the files they name. A fault that the other side can have too stands beside
its twin, under the same name with the side behind it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests that must see it.

    Attributes:
        id: Short name.
        name: What is wrong, in words.
        file: Path of the file below the root.
        old: Text that stands in the file exactly once.
        new: What the fault puts in its place.
        tests: Ids of the tests, each of which must fail.
        source: Where such a fault is publicly known from.
        needs_gpu: Whether only a GPU shows it.
    """

    id: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    source: str
    needs_gpu: bool = False

    def apply(self, text: str) -> str:
        """Return the text of the file with the fault in it.

        Raises:
            ValueError: The old text does not stand there exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its old text stands {count} times")
        return text.replace(self.old, self.new)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        id="M1",
        name="a snapshot is taken one scan chunk late",
        file="reference/metadata.py",
        old="boundaries.index(end) - 1",
        new="boundaries.index(end)",
        tests=("tests/spec/test_metadata.py::test_a_worked_example[reference]",),
        source="Megatron-LM#3922 (review)",
    ),
    Mutant(
        id="M1-optimized",
        name="a snapshot is taken one scan chunk late",
        file="optimized/metadata.py",
        old="number = _ceil_divide(snapshots.positions, scan_chunk_size) - 1",
        new="number = _ceil_divide(snapshots.positions, scan_chunk_size)",
        tests=("tests/equivalence/test_metadata.py::test_edge_slices[5-7-16]",),
        source="Megatron-LM#3922 (review)",
    ),
    Mutant(
        id="M2",
        name="prefill leaves the window after the activation",
        file="reference/conv1d.py",
        old="conv_states[slot] = history[first : first + width - 1].T",
        new="conv_states[slot] = functional.silu(history[first : first + width - 1]).T",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_decode_after_a_prompt_uses_raw_inputs",
        ),
        source="mamba#1027",
    ),
    Mutant(
        id="M2-optimized",
        name="prefill leaves the window after the activation",
        file="optimized/conv1d.py",
        old="conv_states[slots] = self.values[self._windows(rows, ends)].mT",
        new="""\
kept = functional.silu(self.values[self._windows(rows, ends)])
            conv_states[slots] = kept.mT""",
        tests=("tests/equivalence/test_conv1d.py::test_edge_slices[False-37-4]",),
        source="mamba#1027",
    ),
    Mutant(
        id="M3",
        name="a slice shorter than the window forgets older inputs",
        file="reference/conv1d.py",
        old="            conv_states[slot] = history[first : first + width - 1].T",
        new="""\
            kept = history[max(first, width - 1) : first + width - 1].T
            conv_states[slot] = functional.pad(kept, (width - 1 - kept.shape[1], 0))""",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_a_slice_shorter_than_the_window_keeps_older_inputs",
        ),
        source="Megatron-LM#6711",
    ),
    Mutant(
        id="M3-optimized",
        name="a slice shorter than the window forgets older inputs",
        file="optimized/conv1d.py",
        old="""\
            conv_states[slots] = self.values[self._windows(rows, ends)].mT
""",
        new="""\
            kept = self.values[self._windows(rows, ends)].mT
            lens = ends - batch.cu_prefill_lens[rows]
            is_older = torch.arange(self.window, 0, -1) > lens[:, None]
            conv_states[slots] = kept.masked_fill(is_older[:, None], 0)
""",
        tests=("tests/equivalence/test_conv1d.py::test_edge_slices[False-37-4]",),
        source="Megatron-LM#6711",
    ),
    Mutant(
        id="M4",
        name="decay is counted from the scan chunk's start, not the slice's",
        file="reference/scan.py",
        old="""\
        state = ssm_states[row.initial_slot]
""",
        new="""\
        late = row.position % config.scan_chunk_size
        state = ssm_states[row.initial_slot] * 0.9**late
""",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_prompt_cut_anywhere[reference-15-M]",
        ),
        source="TensorRT-LLM#6334",
    ),
    Mutant(
        id="M4-optimized",
        name="decay is counted from the scan chunk's start, not the slice's",
        file="optimized/scan.py",
        old="""\
        initial = ssm_states[self.batch.initial_slot_ids]
""",
        new="""\
        late = self.batch.prefill_starts % self.sources.shape[1]
        initial = ssm_states[self.batch.initial_slot_ids]
        initial = initial * 0.9 ** late[:, None, None, None]
""",
        tests=("tests/equivalence/test_scan.py::test_edge_slices[False-1--1-16]",),
        source="TensorRT-LLM#6334",
    ),
    Mutant(
        id="M5",
        name="only rows that also store a state start from one",
        file="reference/metadata.py",
        old="self._ints([row.initial_slot_id for row in rows])",
        new="""\
self._ints(
                [
                    row.initial_slot_id if row.snapshots else self.sizes.zero_slot
                    for row in rows
                ]
            )""",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_resumed_row_beside_one_that_snapshots[reference]",
        ),
        source="sglang#29368",
    ),
    Mutant(
        id="M5-optimized",
        name="only rows that also store a state start from one",
        file="optimized/metadata.py",
        old="""\
                row.initial_slot_id,
""",
        new="""\
                row.initial_slot_id if row.snapshots else row.slot_id,
""",
        tests=("tests/equivalence/test_metadata.py::test_one_row_of_either_kind",),
        source="sglang#29368",
    ),
    Mutant(
        id="M6",
        name="a state is copied into the next Mamba layer",
        file="reference/snapshots.py",
        old="caches.ssm[:, target] = caches.ssm[:, source]",
        new="caches.ssm[:, target] = caches.ssm[:, source].roll(1, 0)",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_each_mamba_layer_has_a_state_of_its_own[reference]",
        ),
        source="vllm#34874",
    ),
    Mutant(
        id="M6-optimized",
        name="a state is copied into the next Mamba layer",
        file="optimized/snapshots.py",
        old="pool[:, target_slot_ids] = pool[:, source_slot_ids]",
        new="pool[:, target_slot_ids] = pool[:, source_slot_ids].roll(1, 0)",
        tests=("tests/equivalence/test_snapshots.py::test_twins",),
        source="vllm#34874",
    ),
    Mutant(
        id="M7",
        name="states are published after finished rows have left",
        file="reference/engine.py",
        old="""\
        self._commit(plan, record)
        self._sample(batch, plan, logits, tokens, record)
        self._update(plan, record)
""",
        new="""\
        self._sample(batch, plan, logits, tokens, record)
        self._update(plan, record)
        left = [row for row in plan.rows if row.request_id in self._request_ids()]
        self._commit(replace(plan, rows=left), record)
""",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_snapshots_belong_to_their_rows_when_a_row_ends[reference]",
        ),
        source="Megatron-LM#3922 (review)",
    ),
    Mutant(
        id="M7-optimized",
        name="states are published after finished rows have left",
        file="optimized/engine.py",
        old="""\
        self._commit(plan, record)
        self._sample(batch, plan, logits, tokens, record)
        self._update(plan, record)
""",
        new="""\
        self._sample(batch, plan, logits, tokens, record)
        self._update(plan, record)
        names = self._request_ids()
        left = StepPlan([row for row in plan.rows if row.request_id in names])
        self._commit(left, record)
""",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_snapshots_belong_to_their_rows_when_a_row_ends[optimized]",
        ),
        source="Megatron-LM#3922 (review)",
    ),
    Mutant(
        id="M8",
        name="blocks and states are advertised before they are computed",
        file="reference/engine.py",
        old="""\
        logits = self._forward(batch)
        self._commit(plan, record)
""",
        new="""\
        self._commit(plan, record)
        logits = self._forward(batch)
""",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_nothing_is_advertised_before_it_is_computed[reference]",
        ),
        source="sglang#39342",
    ),
    Mutant(
        id="M8-optimized",
        name="blocks and states are advertised before they are computed",
        file="optimized/engine.py",
        old="""\
        logits = self._forward(batch, record)
        self._commit(plan, record)
""",
        new="""\
        self._commit(plan, record)
        logits = self._forward(batch, record)
""",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_nothing_is_advertised_before_it_is_computed[optimized]",
        ),
        source="sglang#39342",
    ),
    Mutant(
        id="M9",
        name="holders that let go of one block are counted once",
        file="reference/kv_blocks.py",
        old="""\
        for block in reversed(block_ids):
            self.holders[block] -= 1
""",
        new="""\
        for block in reversed(block_ids):
            self.holders[block] -= int(self.holders[block] == 1)
""",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_two_holders_that_end_together_let_go_twice[reference]",
        ),
        source="Megatron-LM#6047",
    ),
    Mutant(
        id="M9-optimized",
        name="holders that let go of one block are counted once",
        file="optimized/kv_blocks.py",
        old="np.add.at(self._holders, np.array(block_ids, np.int64), change)",
        new="self._holders[np.array(block_ids, np.int64)] += change",
        tests=(
            "tests/spec/test_kv_blocks.py::"
            "test_a_block_named_twice_is_let_go_twice[optimized-lru]",
        ),
        source="Megatron-LM#6047",
    ),
    Mutant(
        id="M10",
        name="blocks are allocated before the match is pinned",
        file="reference/prefix_cache.py",
        old="""\
        self.blocks.pin(matched)
        if source is not None:
            self.slots.pin(source)
        try:
            return self._allocate(missing, plan)
""",
        new="""\
        try:
            taken = self._allocate(missing, plan)
            self.blocks.pin(matched)
            if source is not None:
                self.slots.pin(source)
            return taken
""",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_match_is_not_evicted_by_its_own_admission[reference]",
        ),
        source="Megatron-LM#5822",
    ),
    Mutant(
        id="M10-optimized",
        name="blocks are allocated before the match is pinned",
        file="optimized/prefix_cache.py",
        old="""\
        self.blocks.pin(matched)
        if source is not None:
            self.slots.pin(source)
        try:
            return self._allocate(missing, plan)
""",
        new="""\
        try:
            taken = self._allocate(missing, plan)
            self.blocks.pin(matched)
            if source is not None:
                self.slots.pin(source)
            return taken
""",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="Megatron-LM#5822",
    ),
    Mutant(
        id="M11",
        name="a block's hash ignores its parent",
        file="lockstep/blocks.py",
        old="hashlib.sha256(parent + array(",
        new="hashlib.sha256(array(",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_equal_blocks_on_different_parents_differ[reference]",
        ),
        source="vllm GHSA-rm76-4mrf-v9r8",
    ),
    Mutant(
        id="M12",
        name="tokens are hashed as text without separators",
        file="lockstep/blocks.py",
        old='array("q", token_ids).tobytes()',
        new='"".join(map(str, token_ids)).encode()',
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_different_prompts_never_share[reference-tokens that read alike]",
        ),
        source="Megatron-LM#4158",
    ),
    Mutant(
        id="M13",
        name="a prompt may be skipped to its very end",
        file="lockstep/policy.py",
        old="[p for p in states if p < length]",
        new="[p for p in states if p <= length]",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_a_prompt_that_ends_on_a_block_backs_off[reference]",
        ),
        source="vllm#11186",
    ),
    Mutant(
        id="M14",
        name="without states, no token is left to compute",
        file="lockstep/policy.py",
        old="[min(matched_kv, length - 1)]",
        new="[min(matched_kv, length)]",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_a_full_match_still_computes_a_token",
        ),
        source="vllm#17999",
    ),
    Mutant(
        id="M15",
        name="a slice ends inside a block",
        file="lockstep/policy.py",
        old="return aligned if start < aligned and end < length else end",
        new="return end",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_budget_off_the_grid_still_hits[reference-37-32]",
        ),
        source="Megatron-LM#5952",
    ),
    Mutant(
        id="M16",
        name="the state at the end of a slice is thrown away",
        file="lockstep/policy.py",
        old="if start < p <= end and",
        new="if start < p < end and",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_the_state_at_the_end_of_a_slice_is_kept[reference]",
        ),
        source="Megatron-LM#5502",
    ),
    Mutant(
        id="M17",
        name="no state is stored at the branch point",
        file="lockstep/policy.py",
        old="wanted = [last, branch, end, penultimate]",
        new="wanted = [last, end, penultimate]",
        tests=(
            "tests/scenarios/test_engine_areas.py::test_five_prompts_along_one_tree[reference]",
        ),
        source="vllm#45238",
    ),
    Mutant(
        id="M18",
        name="a prompt that ends on a block leaves no place to land",
        file="lockstep/policy.py",
        old="penultimate = align_down(length - 1, block_size)",
        new="penultimate = align_down(length, block_size)",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_a_prompt_that_ends_on_a_block_backs_off[reference]",
        ),
        source="vllm#53912",
    ),
    Mutant(
        id="M19",
        name="the state of the block before is restored",
        file="reference/prefix_cache.py",
        old="""\
        block_hash = request.hashes[position // self.sizes.block_size - 1]
        slot = self.slots.lookup(block_hash)
""",
        new="""\
        block_hash = request.hashes[position // self.sizes.block_size - 2]
        slot = self.slots.lookup(block_hash)
""",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_budget_off_the_grid_still_hits[reference-10-32]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M19-optimized",
        name="the state of the block before is restored",
        file="optimized/prefix_cache.py",
        old="""\
        block_hash = request.hashes[position // self.sizes.block_size - 1]
        slot = self.slots.lookup(block_hash)
""",
        new="""\
        block_hash = request.hashes[position // self.sizes.block_size - 2]
        slot = self.slots.lookup(block_hash)
""",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="made up for this list",
    ),
    Mutant(
        id="M20",
        name="one state may be stored twice",
        file="reference/state_slots.py",
        old="if block_hash in self.stored or block_hash in self.reserved:",
        new="if block_hash in self.stored:",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_two_rows_at_one_boundary_share_a_slot[reference]",
        ),
        source="Megatron-LM#6047",
    ),
    Mutant(
        id="M20-optimized",
        name="one state may be stored twice",
        file="optimized/state_slots.py",
        old="if block_hash in self._stored or block_hash in self._reserved:",
        new="if block_hash in self._stored:",
        tests=(
            "tests/spec/test_state_slots.py::test_a_state_is_stored_once[optimized]",
        ),
        source="Megatron-LM#6047",
    ),
    Mutant(
        id="M21",
        name="tokens computed again are written into the shared block",
        file="reference/metadata.py",
        old="is_shared = block < row.num_shared_blocks",
        new="is_shared = block < row.num_shared_blocks - 1",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_recomputed_tokens_leave_shared_blocks_alone[reference]",
        ),
        source="vllm#56196",
    ),
    Mutant(
        id="M21-optimized",
        name="tokens computed again are written into the shared block",
        file="optimized/metadata.py",
        old="is_shared = blocks < columns.num_shared[rows]",
        new="is_shared = blocks < columns.num_shared[rows] - 1",
        tests=(
            "tests/equivalence/test_attention.py::test_shared_blocks_stay_the_same[1]",
        ),
        source="vllm#56196",
    ),
    Mutant(
        id="M22",
        name="the request admitted first is preempted",
        file="reference/scheduler.py",
        old="victim = self.running[-1]",
        new="victim = self.running[0]",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_a_resumed_request_evicts_a_cached_block[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M22-optimized",
        name="the request admitted first is preempted",
        file="optimized/scheduler.py",
        old="victim = self.running[-1]",
        new="victim = self.running[0]",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_a_resumed_request_evicts_a_cached_block[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M23",
        name="a state reached in decode is published and never written",
        file="reference/metadata.py",
        old="row.snapshots[0].slot_id if row.snapshots else self.sizes.dummy_slot",
        new="self.sizes.dummy_slot",
        tests=(
            "tests/scenarios/test_public_bugs.py::test_states_stored_while_many_decode[reference]",
        ),
        source="sglang#32606",
    ),
    Mutant(
        id="M23-optimized",
        name="a state reached in decode is published and never written",
        file="optimized/metadata.py",
        old="row.snapshots[0].slot_id if row.snapshots else dummy for row in rows",
        new="dummy for _ in rows",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_states_stored_while_many_decode[optimized]",
        ),
        source="sglang#32606",
    ),
    Mutant(
        id="M24",
        name="decode stores no states",
        file="reference/prefix_cache.py",
        old="if end % self.sizes.block_size or not self._keeps_states():",
        new="if end % self.sizes.block_size or self._keeps_states():",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_the_second_turn_computes_little[reference-29]",
        ),
        source="llama.cpp#24055",
    ),
    Mutant(
        id="M24-optimized",
        name="decode stores no states",
        file="optimized/prefix_cache.py",
        old="if end % self.sizes.block_size or not self._keeps_states:",
        new="if end % self.sizes.block_size or self._keeps_states:",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="llama.cpp#24055",
    ),
    Mutant(
        id="M25",
        name="parents are evicted before their children",
        file="reference/kv_blocks.py",
        old="if self.holders[block] == 0 and block not in covered",
        new="if self.holders[block] == 0",
        tests=(
            "tests/scenarios/test_engine_areas.py::test_parents_outlive_their_children[reference]",
        ),
        source="Megatron-LM#5822",
    ),
    Mutant(
        id="M25-optimized",
        name="parents are evicted before their children",
        file="optimized/kv_blocks.py",
        old="(self._holders == 0) & (self._num_children == 0)",
        new="(self._holders == 0)",
        tests=("tests/equivalence/test_kv_blocks.py::test_evictions_from_any_forest",),
        source="Megatron-LM#5822",
    ),
    Mutant(
        id="M26",
        name="the slot that a row starts from is written",
        file="reference/scan.py",
        old="""\
        ssm_states[row.live_slot] = state
""",
        new="""\
        ssm_states[row.initial_slot] = ssm_states[row.live_slot] = state
""",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_slot_used_before_starts_from_zero[reference]",
        ),
        source="sglang#17404",
    ),
    Mutant(
        id="M26-optimized",
        name="the slot that a row starts from is written",
        file="optimized/scan.py",
        old="""\
            (self.batch.prefill_slot_ids, self.batch.last_scan_chunks),
""",
        new="""\
            (self.batch.initial_slot_ids, self.batch.last_scan_chunks),
            (self.batch.prefill_slot_ids, self.batch.last_scan_chunks),
""",
        tests=("tests/equivalence/test_scan.py::test_edge_slices[False-1--1-16]",),
        source="sglang#17404",
    ),
    Mutant(
        id="M27",
        name="a new request starts from what its slot held",
        file="reference/prefix_cache.py",
        old="self.sizes.zero_slot if source is None else source",
        new="request.slot_id if source is None else source",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_slot_used_before_starts_from_zero[reference]",
        ),
        source="vllm#56524",
    ),
    Mutant(
        id="M27-optimized",
        name="a new request starts from what its slot held",
        file="optimized/prefix_cache.py",
        old="self.sizes.zero_slot if source is None else source",
        new="request.slot_id if source is None else source",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="vllm#56524",
    ),
    Mutant(
        id="M28",
        name="a later slice starts from zeros",
        file="reference/prefix_cache.py",
        old="""\
        request.initial_slot_id = request.slot_id
""",
        new="""\
        request.initial_slot_id = zero
""",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_prompt_cut_anywhere[reference-16-M]",
        ),
        source="transformers#46032",
    ),
    Mutant(
        id="M28-optimized",
        name="a later slice starts from zeros",
        file="optimized/prefix_cache.py",
        old="""\
        request.initial_slot_id = request.slot_id
""",
        new="""\
        request.initial_slot_id = self.sizes.zero_slot
""",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="transformers#46032",
    ),
    Mutant(
        id="M29",
        name="draws do not depend on the position",
        file="reference/sampler.py",
        old="for word in (position & _MASK, position >> 32 & _MASK, 0)",
        new="for word in (0, 0, 0)",
        tests=("tests/spec/test_sampler.py::test_equals_the_formula[reference]",),
        source="Megatron-LM#5791",
    ),
    Mutant(
        id="M29-optimized",
        name="draws do not depend on the position",
        file="optimized/sampler.py",
        old="""\
        positions & _MASK,
        positions >> 32 & _MASK,
""",
        new="""\
        torch.zeros_like(positions),
        torch.zeros_like(positions),
""",
        tests=(
            "tests/equivalence/test_sampler.py::test_rows_of_every_kind[0.5-37-normal]",
        ),
        source="Megatron-LM#5791",
    ),
    Mutant(
        id="M30",
        name="the highest of equal logits is taken",
        file="reference/sampler.py",
        old="return is_largest.nonzero()[0, 0]",
        new="return is_largest.nonzero()[-1, 0]",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_greedy_and_random_rows_in_one_batch[reference]",
        ),
        source="FreeToken#471",
    ),
    Mutant(
        id="M30-optimized",
        name="the highest of equal logits is taken",
        file="optimized/sampler.py",
        old="return noisy.where(is_random, values).argmax(1)",
        new="""\
chosen = noisy.where(is_random, values).flip(1).argmax(1)
    return logits.shape[1] - 1 - chosen""",
        tests=(
            "tests/equivalence/test_sampler.py::test_rows_of_every_kind[0.5-37-normal]",
        ),
        source="FreeToken#471",
    ),
    Mutant(
        id="M31",
        name="the end token does not end",
        file="lockstep/lifecycle.py",
        old="if token in request.end_token_ids:",
        new="if token in request.end_token_ids[1:]:",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_ignoring_the_end_token_ignores_that_alone[reference]",
        ),
        source="vllm#4589",
    ),
    Mutant(
        id="M32",
        name="requests do not wait for a prefix in the making",
        file="reference/scheduler.py",
        old="if self.cache.first_missing(request) in self._hashes_in_progress():",
        new="if self.cache.first_missing(request) in set[BlockHash]():",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_identical_prompts_cost_one_prefill[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M32-optimized",
        name="requests do not wait for a prefix in the making",
        file="optimized/scheduler.py",
        old="if self.cache.first_missing(request) in in_progress:",
        new="if self.cache.first_missing(request) in set[BlockHash]():",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_identical_prompts_cost_one_prefill[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M33",
        name="one step alone clears a suspect",
        file="reference/scheduler.py",
        old="for r, end in self.solo if r.num_computed < end]",
        new="for r, end in self.solo if not r.num_computed]",
        tests=(
            "tests/scenarios/test_faults.py::"
            "test_a_fault_in_a_later_slice_is_found[reference-False]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M33-optimized",
        name="one step alone clears a suspect",
        file="optimized/scheduler.py",
        old="for r, end in self.solo if r.num_computed < end]",
        new="for r, end in self.solo if not r.num_computed]",
        tests=(
            "tests/scenarios/test_faults.py::"
            "test_a_fault_in_a_later_slice_is_found[optimized-False]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M34",
        name="a failed step keeps its reserved slots",
        file="reference/scheduler.py",
        old="""\
        self.cache.cancel_reservations()
""",
        new="",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_nothing_is_advertised_before_it_is_computed[reference]",
        ),
        source="Megatron-LM#6091",
    ),
    Mutant(
        id="M34-optimized",
        name="a failed step keeps its reserved slots",
        file="optimized/scheduler.py",
        old="""\
        self.cache.cancel_reservations()
""",
        new="",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_nothing_is_advertised_before_it_is_computed[optimized]",
        ),
        source="Megatron-LM#6091",
    ),
    Mutant(
        id="M35",
        name="a state may be evicted while a row reads it",
        file="reference/state_slots.py",
        old="[key for key, slot in self.stored.items() if slot not in self.pins]",
        new="list(self.stored)",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_slot_pinned_by_a_restore_is_not_taken[reference]",
        ),
        source="Megatron-LM#5822",
    ),
    Mutant(
        id="M35-optimized",
        name="a state may be evicted while a row reads it",
        file="optimized/state_slots.py",
        old="uses = np.where(self._pins > 0, _NEVER, self._last_use)",
        new="uses = self._last_use",
        tests=(
            "tests/spec/test_state_slots.py::"
            "test_pinned_states_are_never_evicted[optimized]",
        ),
        source="Megatron-LM#5822",
    ),
    Mutant(
        id="M36",
        name="a second block takes over a hash",
        file="reference/kv_blocks.py",
        old="known = self.by_hash.get(block_hash, block_id)",
        new="known = block_id",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_a_copy_that_goes_leaves_the_other_findable[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M36-optimized",
        name="a second block takes over a hash",
        file="optimized/kv_blocks.py",
        old="known = self._by_hash.get(block_hash, block_id)",
        new="known = block_id",
        tests=(
            "tests/spec/test_kv_blocks.py::"
            "test_a_copy_gives_way_to_what_is_known[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M37",
        name="admission does not ask for a live slot",
        file="reference/prefix_cache.py",
        old="""\
        if not self.slots.num_free_live:
            return False
""",
        new="",
        tests=(
            "tests/scenarios/test_refused.py::test_a_plan_that_does_not_fit_is_refused",
        ),
        source="sglang#39787",
    ),
    Mutant(
        id="M37-optimized",
        name="admission does not ask for a live slot",
        file="optimized/prefix_cache.py",
        old="""\
        if not self.slots.num_free_live:
            return False
""",
        new="",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="sglang#39787",
    ),
    Mutant(
        id="M38",
        name="the last token drawn is given a place",
        file="lockstep/lifecycle.py",
        old="needed = num_blocks_for(total - 1, self.sizes.block_size)",
        new="needed = num_blocks_for(total, self.sizes.block_size)",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_what_fits_exactly_runs_and_what_does_not_is_told[reference]",
        ),
        source="Megatron-LM#5950",
    ),
    Mutant(
        id="M39",
        name="an abort takes memory from under a step",
        file="lockstep/lifecycle.py",
        old="""\
        if self.is_stepping:
            request.abort""",
        new="""\
        if self.is_stepping and not self.scheduler.running:
            request.abort""",
        tests=(
            "tests/scenarios/test_faults.py::"
            "test_an_abort_during_a_step_waits_for_its_end[reference-update]",
        ),
        source="sglang#18746",
    ),
    Mutant(
        id="M40",
        name="the state is rounded only where it is stored",
        file="reference/scan.py",
        old="return new_state.to(state.dtype), y",
        new="return new_state, y",
        tests=(
            "tests/scenarios/test_hazards.py::"
            "test_a_restore_is_exact_where_states_are_stored_short[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M40-optimized",
        name="the state is rounded only where it is stored",
        file="optimized/scan.py",
        old="ends[chunk] = carry = end.to(ssm_states.dtype)",
        new="ends[chunk] = carry = end",
        tests=(
            "tests/equivalence/test_scan.py::"
            "test_resuming_at_a_chunk_is_going_on[0-pool_dtype1]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M41",
        name="a token attends to those after it",
        file="reference/attention.py",
        old="queries[index], keys[:length], values[:length], scale",
        new="queries[index], keys, values, scale",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_a_prompt_cut_anywhere[reference-15-M*]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M41-optimized",
        name="a token attends to the one after it",
        file="optimized/attention.py",
        old="batch.prefill_starts[rows, None] + lanes + 1, 0)",
        new="batch.prefill_starts[rows, None] + lanes + 2, 0)",
        tests=("tests/equivalence/test_attention.py::test_edge_slices[17-16-1]",),
        source="made up for this list",
    ),
    Mutant(
        id="M42",
        name="a failed update reports log-probabilities twice",
        file="reference/engine.py",
        old="""\
            record.reported[row.request_id] = self._describe(
""",
        new="""\
            self._find(row).logprobs.append({})
            record.reported[row.request_id] = self._describe(
""",
        tests=(
            "tests/scenarios/test_faults.py::test_log_probabilities_are_reported_once[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M42-optimized",
        name="a failed update reports log-probabilities twice",
        file="optimized/engine.py",
        old="""\
            record.reported[name] = {record.tokens[name]: own} | likeliest
""",
        new="""\
            self._find(report.row).logprobs.append({})
            record.reported[name] = {record.tokens[name]: own} | likeliest
""",
        tests=(
            "tests/scenarios/test_faults.py::"
            "test_log_probabilities_are_reported_once[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M43",
        name="dropped content keeps its state",
        file="reference/prefix_cache.py",
        old="""\
        self._drop_states(self.blocks.release(request.block_table))
""",
        new="""\
        self.blocks.release(request.block_table)
""",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_content_dropped_at_zero_is_shared_until_then[reference]",
        ),
        source="Megatron-LM#6711",
    ),
    Mutant(
        id="M43-optimized",
        name="dropped content keeps its state",
        file="optimized/prefix_cache.py",
        old="""\
        self._drop_states(self.blocks.release(request.block_table))
""",
        new="""\
        self.blocks.release(request.block_table)
""",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="Megatron-LM#6711",
    ),
    Mutant(
        id="M44",
        name="a state is replaced though another request counts on it",
        file="reference/state_slots.py",
        old="return block_hash in self.replaceable and not is_read",
        new="return not is_read",
        tests=(
            "tests/spec/test_state_slots.py::"
            "test_a_state_is_replaced_only_by_the_request_that_stored_it[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M44-optimized",
        name="a state is replaced though another request counts on it",
        file="optimized/state_slots.py",
        old="return is_idle and block_hash in self._replaceable and",
        new="return is_idle and",
        tests=(
            "tests/spec/test_state_slots.py::"
            "test_a_state_is_replaced_only_by_the_request_that_stored_it[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M45",
        name="requests are admitted in a step that had to preempt",
        file="reference/scheduler.py",
        old="""\
        if plan.preempted:
            return "a request was preempted: there are too few blocks"
""",
        new="",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_nobody_is_admitted_in_a_step_that_preempts[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M45-optimized",
        name="requests are admitted in a step that had to preempt",
        file="optimized/scheduler.py",
        old="""\
        if plan.preempted:
            return "a request was preempted: there are too few blocks"
""",
        new="",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_nobody_is_admitted_in_a_step_that_preempts[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M46",
        name="top-k keeps all that equal the last one kept",
        file="reference/sampler.py",
        old="order = order[: int(draw.top_ks)]",
        new="order = order[values[order] >= values[order][: int(draw.top_ks)][-1]]",
        tests=("tests/spec/test_sampler.py::test_of_equals_the_lowest_ids_stay",),
        source="Megatron-LM (torch sampler)",
    ),
    Mutant(
        id="M46-optimized",
        name="top-k keeps all that equal the last one kept",
        file="optimized/sampler.py",
        old="is_left = ranks < num_left",
        new="is_left = ordered >= ordered.gather(1, num_left - 1)",
        tests=("tests/spec/test_sampler.py::test_of_equals_the_lowest_ids_stay",),
        source="Megatron-LM (torch sampler)",
    ),
    Mutant(
        id="M47",
        name="top-p leaves out the token that reaches the share",
        file="reference/sampler.py",
        old="order = order[: int(too_few.sum()) + 1]",
        new="order = order[: int(too_few.sum())]",
        tests=("tests/spec/test_sampler.py::test_of_equals_the_lowest_ids_stay",),
        source="made up for this list",
    ),
    Mutant(
        id="M47-optimized",
        name="top-p leaves out the token that reaches the share",
        file="optimized/sampler.py",
        old="num_enough = is_too_few.sum(1, keepdim=True) + 1",
        new="num_enough = is_too_few.sum(1, keepdim=True)",
        tests=("tests/spec/test_sampler.py::test_of_equals_the_lowest_ids_stay",),
        source="made up for this list",
    ),
    Mutant(
        id="M48",
        name="top-p takes its share of all tokens, not of those that top-k left",
        file="reference/sampler.py",
        old="too_few = sums < draw.top_ps * sums[-1]",
        new="too_few = sums[:-1] < draw.top_ps * torch.exp(values.double()).sum()",
        tests=(
            "tests/spec/test_sampler.py::"
            "test_filtered_draws_follow_the_filtered_softmax",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M48-optimized",
        name="top-p takes its share of all tokens, not of those that top-k left",
        file="optimized/sampler.py",
        old="sums < top_ps * sums.gather(1, num_left - 1)",
        new="sums < top_ps * sums[:, -1:]",
        tests=(
            "tests/spec/test_sampler.py::"
            "test_filtered_draws_follow_the_filtered_softmax",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M49",
        name="min-p drops the likeliest itself",
        file="reference/sampler.py",
        old="masses[: len(order)] >= draw.min_ps",
        new="masses[: len(order)] > draw.min_ps",
        tests=("tests/spec/test_sampler.py::test_of_equals_the_lowest_ids_stay",),
        source="made up for this list",
    ),
    Mutant(
        id="M49-optimized",
        name="min-p drops the likeliest itself",
        file="optimized/sampler.py",
        old="(masses >= min_ps)",
        new="(masses > min_ps)",
        tests=("tests/spec/test_sampler.py::test_of_equals_the_lowest_ids_stay",),
        source="made up for this list",
    ),
    Mutant(
        id="M50",
        name="token 0 cannot be banned",
        file="reference/sampler.py",
        old="draw.banned_ids[draw.banned_ids >= 0]",
        new="draw.banned_ids[draw.banned_ids > 0]",
        tests=(
            "tests/spec/test_sampler.py::"
            "test_filtered_draws_follow_the_filtered_softmax",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M50-optimized",
        name="token 0 cannot be banned",
        file="optimized/sampler.py",
        old="banned_ids.where(banned_ids >= 0, vocab_size)",
        new="banned_ids.where(banned_ids > 0, vocab_size)",
        tests=(
            "tests/equivalence/test_sampler.py::test_rows_of_every_kind[0.5-37-normal]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M51",
        name="noise goes by rank, not by token id",
        file="reference/sampler.py",
        old="values[likeliest] + noise[likeliest]",
        new="values[likeliest] + noise[: len(likeliest)]",
        tests=(
            "tests/spec/test_sampler.py::test_filters_equal_their_definition[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M52",
        name="end ids are banned for a token too long",
        file="lockstep/request.py",
        old="self.num_generated < self.sampling.min_tokens",
        new="self.num_generated <= self.sampling.min_tokens",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_min_tokens_blocks_no_longer_than_asked[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M53",
        name="min_tokens bans end-of-sequence tokens alone",
        file="lockstep/request.py",
        old="return self.end_token_ids if is_short else ()",
        new="return self.eos_token_ids if is_short else ()",
        tests=(
            "tests/scenarios/test_sampling.py::test_min_tokens_blocks_every_end_id",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M54",
        name="ignore_eos ignores stop tokens, too",
        file="lockstep/request.py",
        old="return (*self.eos_token_ids, *self.sampling.stop_token_ids)",
        new="""\
return self.eos_token_ids and (
            *self.eos_token_ids, *self.sampling.stop_token_ids
        )
""",
        tests=(
            "tests/scenarios/test_public_bugs.py::"
            "test_ignoring_the_end_token_ignores_that_alone[reference]",
        ),
        source="vllm#4589",
    ),
    Mutant(
        id="M55",
        name="a state is skipped to whose logits are asked for",
        file="lockstep/policy.py",
        old="if p <= first_logits]",
        new="if p <= first_logits + 1]",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_what_is_asked_for_is_computed_not_skipped[reference-16-0-15-M*]",
        ),
        source="vllm#3251",
    ),
    Mutant(
        id="M56",
        name="without states, one position too many is skipped",
        file="lockstep/policy.py",
        old="""\
if needs_state else first_logits
""",
        new="""\
if needs_state else first_logits + 1
""",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_what_is_asked_for_is_computed_not_skipped[reference-16-0-15-*]",
        ),
        source="vllm#8268",
    ),
    Mutant(
        id="M57",
        name="prompt tokens are reported again after a preemption",
        file="lockstep/request.py",
        old="first = self.sampling.prompt_logprobs_from + len(self.prompt_logprobs)",
        new="first = self.sampling.prompt_logprobs_from or 1",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_reports_outlive_a_preemption_and_come_once[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M58",
        name="a prompt token is reported from its own logits",
        file="reference/engine.py",
        old="request.token_ids[position + 1]",
        new="request.token_ids[position]",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_a_prompt_is_reported_from_a_position_on[reference-1-7-False]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M58-optimized",
        name="a prompt token is reported from its own logits",
        file="optimized/engine.py",
        old="request.token_ids[position + 1]",
        new="request.token_ids[position]",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_a_prompt_is_reported_from_a_position_on[optimized-1-7-False]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M59",
        name="logits are counted as if every token had some",
        file="reference/engine.py",
        old="offset += len(positions)",
        new="offset += row.num_tokens",
        tests=(
            "tests/scenarios/test_sampling.py::test_a_branch_reports_its_own_tokens[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M59-optimized",
        name="logits are counted as if every token had some",
        file="optimized/engine.py",
        old="offset += len(positions)",
        new="offset += row.num_tokens",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_a_branch_reports_its_own_tokens[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M60",
        name="a request ended within a step is called aborted",
        file="lockstep/lifecycle.py",
        old="request.abort_reason = reason",
        new="request.abort_reason = FinishReason.ABORT",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_a_request_ended_within_a_step_has_stopped[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M61",
        name="a recorded plan may skip what is asked for",
        file="reference/prefix_cache.py",
        old="if forced and (not possible or forced > last):",
        new="if forced and (not possible or forced >= length):",
        tests=(
            "tests/scenarios/test_sampling.py::"
            "test_a_plan_that_skips_what_is_asked_for_is_refused[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M61-optimized",
        name="a recorded plan may skip what is asked for",
        file="optimized/prefix_cache.py",
        old="if forced and (not possible or forced > last):",
        new="if forced and (not possible or forced >= length):",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="made up for this list",
    ),
    Mutant(
        id="M62",
        name="the builder of both kinds forgets where a slice begins",
        file="optimized/metadata.py",
        old="shifted = first_tokens - columns.starts + first",
        new="shifted = first_tokens + first",
        tests=("tests/equivalence/test_metadata.py::test_any_step",),
        source="made up for this list",
    ),
    Mutant(
        id="M63",
        name="a stop string is looked for in each token alone",
        file="lockstep/tokenizer.py",
        old="text = self._held + text",
        new="self._held = text",
        tests=(
            "tests/scenarios/test_text.py::"
            "test_a_stop_string_over_several_tokens_is_never_shown"
            "[reference-others0-or no]",
            "tests/test_tokenizer.py::test_the_first_stop_string",
        ),
        source="vllm#3574",
    ),
    Mutant(
        id="M64",
        name="text is shown that may become a stop string",
        file="lockstep/tokenizer.py",
        old="cut = len(text) if final else self._first_doubt(text)",
        new="cut = len(text)",
        tests=("tests/test_tokenizer.py::test_stop_strings_in_any_split",),
        source="vllm#2577",
    ),
    Mutant(
        id="M65",
        name="a replacement stands in for half a character",
        file="lockstep/tokenizer.py",
        old="return text.rstrip(REPLACEMENT)",
        new="return text",
        tests=(
            "tests/test_tokenizer.py::test_an_emoji_over_several_tokens_comes_whole",
            "tests/scenarios/test_text.py::test_emoji_over_several_tokens[reference]",
        ),
        source="vllm#45636",
    ),
    Mutant(
        id="M66",
        name="a stream that is closed leaves its requests running",
        file="lockstep/llm.py",
        old="""\
                self.abort(reply.request_id)
""",
        new="",
        tests=(
            "tests/test_llm.py::test_closing_a_stream_aborts_what_is_left",
            "tests/test_llm.py::test_an_interruption_aborts_what_was_started",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M67",
        name="a stream takes the tokens of its own step alone",
        file="lockstep/llm.py",
        old="if name not in self._replies:",
        new="if name not in self._replies or len(record.tokens) > 2:",
        tests=("tests/test_llm.py::test_streams_may_be_open_side_by_side",),
        source="made up for this list",
    ),
    Mutant(
        id="M68",
        name="a stop string stays in the conversation",
        file="lockstep/chat.py",
        old="""\
            token_ids.pop()
""",
        new="""\
            break
""",
        tests=(
            "tests/test_chat.py::test_a_stop_string_is_no_part_of_the_conversation",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M80",
        name="heads are turned by the place in the step, not the position",
        file="reference/model.py",
        old="queries, *given, batch.positions, config.rotary",
        new="queries, *given, batch.kv_index, config.rotary",
        tests=("tests/test_family_engines.py::test_cached_cut_and_crowded[llama]",),
        source="made up for this list",
    ),
    Mutant(
        id="M80-optimized",
        name="heads are turned by the place in the step, not the position",
        file="optimized/model.py",
        old="queries, *given, batch.positions, config.rotary",
        new="queries, *given, batch.kv_index, config.rotary",
        tests=(
            "tests/spec/test_model.py::test_blocks_may_lie_anywhere[optimized-turned]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M81",
        name="heads are turned the other way",
        file="reference/attention.py",
        old="(first * cos - second * sin, second * cos + first * sin)",
        new="(first * cos + second * sin, second * cos - first * sin)",
        tests=(
            "tests/spec/test_attention.py::"
            "test_rotary_equals_transformers[reference-whole]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M81-optimized",
        name="heads are turned the other way",
        file="optimized/attention.py",
        old="(first * cos - second * sin, second * cos + first * sin)",
        new="(first * cos + second * sin, second * cos - first * sin)",
        tests=(
            "tests/spec/test_model.py::test_equals_dense_operations[optimized-turned]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M82",
        name="whole heads are turned where a part is",
        file="reference/attention.py",
        old="size = config.size(queries.shape[2])",
        new="size = queries.shape[2]",
        tests=(
            "tests/test_transformers.py::test_variant[bamba, half of each head turned]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M82-optimized",
        name="whole heads are turned where a part is",
        file="optimized/attention.py",
        old="size = config.size(queries.shape[2])",
        new="size = queries.shape[2]",
        tests=("tests/equivalence/test_attention.py::test_rotary_far_away",),
        source="made up for this list",
    ),
    Mutant(
        id="M83",
        name="queries and keys that are turned are not normed",
        file="reference/model.py",
        old="if layer.q_norm is not None and layer.k_norm is not None:",
        new="if None not in (layer.q_norm, layer.k_norm) and not config.rotary:",
        tests=("tests/test_transformers.py::test_variant[qwen3, plain]",),
        source="made up for this list",
    ),
    Mutant(
        id="M83-optimized",
        name="queries and keys that are turned are not normed",
        file="optimized/model.py",
        old="if layer.q_norm is not None and layer.k_norm is not None:",
        new="if None not in (layer.q_norm, layer.k_norm) and not config.rotary:",
        tests=(
            "tests/spec/test_model.py::test_equals_dense_operations[optimized-turned]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M84",
        name="gate and features change places",
        file="reference/mlp.py",
        old="gates, features = inputs.chunk(2, dim=1)",
        new="features, gates = inputs.chunk(2, dim=1)",
        tests=("tests/test_transformers.py::test_variant[llama, plain]",),
        source="made up for this list",
    ),
    Mutant(
        id="M84-optimized",
        name="gate and features change places",
        file="optimized/mlp.py",
        old="gates, features = inputs.chunk(2, dim=1)",
        new="features, gates = inputs.chunk(2, dim=1)",
        tests=("tests/equivalence/test_mlp.py::test_roundings_are_the_twins",),
        source="made up for this list",
    ),
    Mutant(
        id="M85",
        name="softmax weights are taken over all experts",
        file="reference/moe.py",
        old="weights[token] = _weigh(scores[ids[token]], config)",
        new="weights[token] = _weigh(scores, config)[ids[token]]",
        tests=(
            "tests/spec/test_moe.py::test_softmax_route_equals_transformers[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M85-optimized",
        name="softmax weights are taken over all experts",
        file="optimized/moe.py",
        old="_weigh(scores.gather(1, ids), config)",
        new="_weigh(scores, config).gather(1, ids)",
        tests=("tests/equivalence/test_moe.py::test_edge_sizes[softmax-7]",),
        source="made up for this list",
    ),
    Mutant(
        id="M86",
        name="the gated norm is one over all channels",
        file="reference/model.py",
        old="            config.num_groups,",
        new="            1,",
        tests=("tests/test_transformers.py::test_variant[mamba2, plain]",),
        source="made up for this list",
    ),
    Mutant(
        id="M86-optimized",
        name="the gated norm is one over all channels",
        file="optimized/model.py",
        old="            config.num_groups,",
        new="            1,",
        tests=(
            "tests/spec/test_model.py::test_equals_dense_operations[optimized-scaled]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M87",
        name="what a layer adds is not scaled",
        file="reference/model.py",
        old="""\
            update = _times(update, config.residual_multiplier)
""",
        new="",
        tests=("tests/test_transformers.py::test_variant[granitemoehybrid, experts]",),
        source="made up for this list",
    ),
    Mutant(
        id="M87-optimized",
        name="what a layer adds is not scaled",
        file="optimized/model.py",
        old="update = _times(layer(hidden, batch, caches), config.residual_multiplier)",
        new="update = layer(hidden, batch, caches)",
        tests=(
            "tests/spec/test_model.py::test_equals_dense_operations[optimized-scaled]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M88",
        name="a buffer keeps the snapshots of an earlier step where this one has none",
        file="optimized/buffers.py",
        old="""\
            view[...] = arrays[name]
""",
        new="""\
            if not name.startswith("snapshot_") or len(set(arrays[name])) > 1:
                view[...] = arrays[name]
""",
        tests=(
            "tests/equivalence/test_metadata.py::test_a_buffer_holds_one_step_alone",
        ),
        source="Megatron-LM#3922 (review)",
    ),
    Mutant(
        id="M89",
        name="a buffer is rewritten as far as the new array is long",
        file="optimized/buffers.py",
        old="""\
            view[...] = arrays[name]
""",
        new="""\
            count = np.count_nonzero(arrays[name])
            view.reshape(-1)[:count] = arrays[name].reshape(-1)[:count]
""",
        tests=(
            "tests/equivalence/test_metadata.py::test_a_buffer_holds_one_step_alone",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M90",
        name="padded decode rows name slot 0",
        file="optimized/metadata.py",
        old='"decode_slot_ids": _filled(columns.slots[: len(rows)], size, dummy)',
        new='"decode_slot_ids": _filled(columns.slots[: len(rows)], size, 0)',
        tests=(
            "tests/equivalence/test_metadata.py::test_padding_harms_nobody",
            "tests/equivalence/test_conv1d.py::test_any_padded_step",
        ),
        source="TensorRT-LLM#13151",
    ),
    Mutant(
        id="M91",
        name="padded prefill rows name slot 0",
        file="optimized/metadata.py",
        old='"prefill_slot_ids": _filled(slots, size, sizes.dummy_slot)',
        new='"prefill_slot_ids": _filled(slots, size, 0)',
        tests=(
            "tests/equivalence/test_metadata.py::test_padding_harms_nobody",
            "tests/equivalence/test_conv1d.py::test_any_padded_step",
        ),
        source="TensorRT-LLM#13151",
    ),
    Mutant(
        id="M92",
        name="padded snapshots go to slot 0",
        file="optimized/metadata.py",
        old='"snapshot_slot_ids": _filled(snapshots.slots, size, dummy)',
        new='"snapshot_slot_ids": _filled(snapshots.slots, size, 0)',
        tests=("tests/equivalence/test_metadata.py::test_padding_harms_nobody",),
        source="TensorRT-LLM#13151",
    ),
    Mutant(
        id="M93",
        name="padding writes block 0",
        file="optimized/metadata.py",
        old="nowhere = self.sizes.dummy_block * self.sizes.block_size",
        new="nowhere = 0",
        tests=("tests/equivalence/test_metadata.py::test_padding_harms_nobody",),
        source="Megatron-LM#5950",
    ),
    Mutant(
        id="M94",
        name="padded rows start from whatever the dummy slot holds",
        file="optimized/metadata.py",
        old='"initial_slot_ids": _filled(initial, size, sizes.zero_slot)',
        new='"initial_slot_ids": _filled(initial, size, sizes.dummy_slot)',
        tests=("tests/equivalence/test_metadata.py::test_padding_harms_nobody",),
        source="made up for this list",
    ),
    Mutant(
        id="M95",
        name="block tables end in -1",
        file="optimized/metadata.py",
        old="tables = np.full((len(rows), width), self.sizes.dummy_block, np.int64)",
        new="tables = np.full((len(rows), width), -1, np.int64)",
        tests=("tests/equivalence/test_metadata.py::test_any_step[sizes0]",),
        source="Megatron-LM#6481",
    ),
    Mutant(
        id="M96",
        name="padded draws are random",
        file="optimized/metadata.py",
        old='"draws.temperatures": _filled(temperatures, size, 0)',
        new='"draws.temperatures": _filled(temperatures, size, 1)',
        tests=("tests/equivalence/test_metadata.py::test_padding_harms_nobody",),
        source="made up for this list",
    ),
    Mutant(
        id="M97",
        name="prefill tokens begin at the real number of decode rows",
        file="optimized/metadata.py",
        old="decodes, first = self.real.decodes, self.padded.decodes",
        new="decodes, first = self.real.decodes, self.real.decodes",
        tests=("tests/equivalence/test_metadata.py::test_padding_moves_nothing",),
        source="made up for this list",
    ),
    Mutant(
        id="M98",
        name="prefill rows begin at the real number of decode rows",
        file="optimized/attention.py",
        old="return rows + batch.num_decode_tokens, tokens, visible",
        new="return rows + batch.shape.decode_requests, tokens, visible",
        tests=(
            "tests/equivalence/test_attention.py::test_shared_blocks_stay_the_same[1]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M99",
        name="logits are taken where tokens would be without padding",
        file="optimized/metadata.py",
        old="shifted = wanted + gap * (wanted >= self.real.decodes)",
        new="shifted = wanted",
        tests=("tests/equivalence/test_metadata.py::test_padding_moves_nothing",),
        source="made up for this list",
    ),
    Mutant(
        id="M100",
        name="a row's context ends before its new tokens",
        file="optimized/metadata.py",
        old='"context_lens": self._by_kind(columns.ends, size, 0)',
        new='"context_lens": self._by_kind(columns.starts, size, 0)',
        tests=("tests/equivalence/test_metadata.py::test_any_step[sizes0]",),
        source="made up for this list",
    ),
    Mutant(
        id="M101",
        name="a shape has no room for chunks cut off the grid",
        file="optimized/metadata.py",
        old="chunks = shape.prefill_tokens // sizes.scan_chunk_size + 2 * prefills",
        new="chunks = shape.prefill_tokens // sizes.scan_chunk_size + prefills",
        tests=(
            "tests/equivalence/test_metadata.py::"
            "test_the_fullest_steps_fit_their_shape",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M102",
        name="a shape has room for one snapshot a row",
        file="optimized/metadata.py",
        old="snapshots=3 * prefills,",
        new="snapshots=prefills,",
        tests=(
            "tests/equivalence/test_metadata.py::"
            "test_the_fullest_steps_fit_their_shape",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M103",
        name="a step that fits no room is padded all the same",
        file="optimized/metadata.py",
        old="return host if fits else real",
        new="return host",
        tests=(
            "tests/equivalence/test_graphs.py::"
            "test_a_step_that_fits_no_room_says_why[logits]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M104",
        name="a step of its own size is sent to the fixed places",
        file="optimized/metadata.py",
        old="if padded in self._fixed:",
        new="if self._fixed:",
        tests=(
            "tests/equivalence/test_metadata.py::"
            "test_a_step_that_fits_no_room_leaves_the_buffer_alone",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M105",
        name="a shape hosts more prompts than it has rows for",
        file="lockstep/policy.py",
        old="""\
            and host.prefill_requests >= shape.prefill_requests
""",
        new="",
        tests=("tests/equivalence/test_graphs.py::test_every_step_fits_a_shape[4-64]",),
        source="made up for this list",
    ),
    Mutant(
        id="M106",
        name="room for prompts is counted with that of decodes",
        file="lockstep/policy.py",
        old="and host.prefill_tokens >= shape.prefill_tokens",
        new="and host.tokens >= shape.tokens",
        tests=("tests/equivalence/test_graphs.py::test_every_step_fits_a_shape[4-64]",),
        source="made up for this list",
    ),
    Mutant(
        id="M107",
        name="the largest shape lacks the last doubling",
        file="lockstep/policy.py",
        old="""\
        least *= factor
    yield most
""",
        new="""\
        least *= factor
""",
        tests=("tests/equivalence/test_graphs.py::test_every_step_fits_a_shape[4-64]",),
        source="made up for this list",
    ),
    Mutant(
        id="M108",
        name="query heads are dealt to K/V heads in turn",
        file="optimized/attention.py",
        old=".unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)",
        new=".unflatten(2, (-1, num_kv_heads)).permute(0, 3, 2, 1, 4)",
        tests=("tests/equivalence/test_attention.py::test_heads[heads1]",),
        source="made up for this list",
    ),
    Mutant(
        id="M109",
        name="tiles are counted as if rows were packed into them",
        file="optimized/attention.py",
        old="most = min(num_tokens, num_tokens // _TILE_TOKENS + len(lens))",
        new="most = -(-num_tokens // _TILE_TOKENS)",
        tests=("tests/equivalence/test_attention.py::test_edge_slices[17-16-1]",),
        source="made up for this list",
    ),
    Mutant(
        id="M110",
        name="unseen K/V is weighed with zero, and may be NaN",
        file="optimized/attention.py",
        old="values = values.to(wide).masked_fill(is_unseen[..., None, None], 0)",
        new="values = values.to(wide)",
        tests=("tests/equivalence/test_attention.py::test_edge_slices[17-16-1]",),
        source="made up for this list",
    ),
    Mutant(
        id="M111",
        name="padding gets from attention what memory held",
        file="optimized/attention.py",
        old="outputs = queries.new_zeros(num_tokens + 1, *queries.shape[1:])",
        new="outputs = queries.new_empty(num_tokens + 1, *queries.shape[1:])",
        tests=(
            "tests/equivalence/test_attention.py::test_shared_blocks_stay_the_same[1]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M112",
        name="a row's first token belongs to the row before",
        file="optimized/conv1d.py",
        old="rows = torch.searchsorted(batch.cu_prefill_lens[1:], tokens, right=True)",
        new="rows = torch.searchsorted(batch.cu_prefill_lens[1:], tokens)",
        tests=("tests/equivalence/test_conv1d.py::test_edge_slices[False-37-4]",),
        source="made up for this list",
    ),
    Mutant(
        id="M113",
        name="a decode window keeps the oldest input",
        file="optimized/conv1d.py",
        old="conv_states[batch.decode_slot_ids] = history[:, 1:].mT",
        new="conv_states[batch.decode_slot_ids] = history[:, :-1].mT",
        tests=("tests/equivalence/test_conv1d.py::test_rows_of_one_kind[True-7]",),
        source="made up for this list",
    ),
    Mutant(
        id="M114",
        name="a row goes on from the state of the row before",
        file="optimized/scan.py",
        old="is_first[1:] = rows[1:] != rows[:-1]",
        new="is_first[1:] = False",
        tests=("tests/equivalence/test_scan.py::test_edge_slices[False-1--1-16]",),
        source="made up for this list",
    ),
    Mutant(
        id="M115",
        name="empty lanes of a chunk hold the next row's tokens",
        file="optimized/scan.py",
        old="self.sources = lanes.where(lanes < ends[:, None], num_tokens)",
        new="self.sources = lanes.clamp(max=num_tokens)",
        tests=("tests/equivalence/test_scan.py::test_edge_slices[False-1--1-16]",),
        source="made up for this list",
    ),
    Mutant(
        id="M116",
        name="a lane's own decay counts from before it",
        file="optimized/scan.py",
        old="pairs = steps[..., None].expand(*steps.shape, lanes).tril(-1)",
        new="pairs = steps[..., None].expand(*steps.shape, lanes).tril()",
        tests=("tests/equivalence/test_scan.py::test_edge_slices[False-1--1-16]",),
        source="made up for this list",
    ),
    Mutant(
        id="M117",
        name="time steps have no upper limit",
        file="optimized/scan.py",
        old=".clamp(*config.time_step_limit)",
        new=".clamp(config.time_step_limit[0])",
        tests=("tests/equivalence/test_scan.py::test_time_steps_are_clamped[limit0]",),
        source="made up for this list",
    ),
    Mutant(
        id="M118",
        name="decode states are kept before the step",
        file="optimized/model.py",
        old="""\
        for layer, next_norm in zip(self._layers, self._norms[1:], strict=True):
            update = _times(layer(hidden, batch, caches), config.residual_multiplier)
            residual, hidden = components.add_rms_norm(residual, update, next_norm, eps)
        components.copy_states(
            caches,
            batch.decode_slot_ids,
            batch.decode_snapshot_slot_ids,
            self.sizes.dummy_slot,
        )
""",
        new="""\
        components.copy_states(
            caches,
            batch.decode_slot_ids,
            batch.decode_snapshot_slot_ids,
            self.sizes.dummy_slot,
        )
        for layer, next_norm in zip(self._layers, self._norms[1:], strict=True):
            update = _times(layer(hidden, batch, caches), config.residual_multiplier)
            residual, hidden = components.add_rms_norm(residual, update, next_norm, eps)
""",
        tests=("tests/spec/test_model.py::test_decode_snapshots[optimized-hybrid]",),
        source="made up for this list",
    ),
    Mutant(
        id="M119",
        name="padding is routed to experts",
        file="optimized/moe.py",
        old="return ids.masked_fill(is_padding, -1), weights",
        new="return ids, weights",
        tests=(
            "tests/equivalence/test_moe.py::"
            "test_padding_harms_nobody[nan-plain-dtype0]",
        ),
        source="Megatron-LM#4922",
    ),
    Mutant(
        id="M120",
        name="a tile at an edge goes to the expert before",
        file="optimized/moe.py",
        old="self.experts = torch.searchsorted(tile_ends, tiles, right=True)",
        new="self.experts = torch.searchsorted(tile_ends, tiles)",
        tests=(
            "tests/equivalence/test_moe.py::"
            "test_every_pair_has_one_row_of_its_expert[99-3]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M121",
        name="tiles are counted as if experts shared them",
        file="optimized/moe.py",
        old="num_tiles = min(num_pairs, num_pairs // height + num_experts)",
        new="num_tiles = -(-num_pairs // height)",
        tests=(
            "tests/equivalence/test_moe.py::"
            "test_every_pair_has_one_row_of_its_expert[99-3]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M122",
        name="of equal experts the highest ids are taken",
        file="optimized/moe.py",
        old="scores.sort(dim=1, descending=True, stable=True).indices[:, :count]",
        new="""\
(
        scores.shape[1] - 1 - scores.flip(1).sort(
            dim=1, descending=True, stable=True
        ).indices[:, :count]
    )""",
        tests=("tests/equivalence/test_moe.py::test_ties[plain]",),
        source="made up for this list",
    ),
    Mutant(
        id="M123",
        name="filters mark ranks, not tokens",
        file="optimized/sampler.py",
        old="return torch.zeros_like(is_left).scatter_(1, order, is_left)",
        new="return is_left",
        tests=(
            "tests/equivalence/test_sampler.py::test_rows_of_every_kind[0.5-37-normal]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M124",
        name="noise depends on a row's place in the batch",
        file="optimized/sampler.py",
        old="seeds, positions = seeds[:, None], positions[:, None]",
        new="seeds, positions = seeds[:, None], torch.arange(len(seeds))[:, None]",
        tests=("tests/equivalence/test_sampler.py::test_company_changes_nothing",),
        source="made up for this list",
    ),
    Mutant(
        id="M125",
        name="all tokens of a row have the same noise",
        file="optimized/sampler.py",
        old="token_ids = torch.arange(vocab_size, device=seeds.device)",
        new="token_ids = torch.zeros(vocab_size, device=seeds.device).long()",
        tests=(
            "tests/equivalence/test_sampler.py::test_rows_of_every_kind[0.5-37-normal]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M126",
        name="parts of a large step come in the wrong order",
        file="optimized/sampler.py",
        old="[_draw(rows, Draws(*entries)) for rows, *entries in parts]",
        new="[_draw(rows, Draws(*entries)) for rows, *entries in parts][::-1]",
        tests=("tests/equivalence/test_sampler.py::test_rows_in_parts[37]",),
        source="made up for this list",
    ),
    Mutant(
        id="M127",
        name="the tokens are read twice",
        file="optimized/engine.py",
        old="drawn = self.components.sample(logits[batch.sample_index], batch.draws)",
        new="""\
drawn = self.components.sample(logits[batch.sample_index], batch.draws)
        assert bool((drawn >= 0).all())""",
        tests=(
            "tests/equivalence/test_graphs.py::test_only_tokens_and_reports_are_read",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M128",
        name="draws of padded rows are read among reports",
        file="optimized/engine.py",
        old="self._read(drawn[: len(rows)], logits, reports)",
        new="self._read(drawn, logits, reports)",
        tests=("tests/equivalence/test_graphs.py::test_reports_are_the_references",),
        source="made up for this list",
    ),
    Mutant(
        id="M129",
        name="a chosen token is reported as the step's first",
        file="optimized/engine.py",
        old="token = drawn[report.draw] if report.token is None else report.token",
        new="token = drawn[0] if report.token is None else report.token",
        tests=("tests/equivalence/test_graphs.py::test_reports_are_the_references",),
        source="made up for this list",
    ),
    Mutant(
        id="M130",
        name="a block that is replaced is not given back",
        file="optimized/kv_blocks.py",
        old="""\
            self._push(np.array([block_id]))
""",
        new="",
        tests=(
            "tests/spec/test_kv_blocks.py::"
            "test_a_copy_gives_way_to_what_is_known[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M131",
        name="parents are let go of before their children",
        file="optimized/kv_blocks.py",
        old="unique = self._add_holders(block_ids, -1)[::-1]",
        new="unique = self._add_holders(block_ids, -1)",
        tests=("tests/equivalence/test_kv_blocks.py::test_any_operations[lru]",),
        source="made up for this list",
    ),
    Mutant(
        id="M132",
        name="blocks that lose a holder are not counted as evictable",
        file="optimized/kv_blocks.py",
        old="self._num_evictable += self._count_idle(unique) - idle_before",
        new="self._num_evictable -= max(0, idle_before - self._count_idle(unique))",
        tests=(
            "tests/spec/test_kv_blocks.py::test_lru_keeps_what_nobody_holds[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M133",
        name="what is cached does not count when room is estimated",
        file="optimized/prefix_cache.py",
        old="return needed - self._count_cached(request) > most",
        new="return needed > most",
        tests=("tests/equivalence/test_prefix_cache.py::test_any_calls[0]",),
        source="made up for this list",
    ),
    Mutant(
        id="M134",
        name="a request that was sent back finds its old block table",
        file="optimized/scheduler.py",
        old="""\
        del self._by_name()[request.request_id]
        self._tables.pop(request.request_id, None)
""",
        new="""\
        del self._by_name()[request.request_id]
""",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_a_resumed_request_evicts_a_cached_block[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M135",
        name="rows go on with a block that was replaced",
        file="optimized/scheduler.py",
        old="""\
                self._tables.pop(request.request_id, None)
        self.suspect = None
""",
        new="""\
                pass
        self.suspect = None
""",
        tests=(
            "tests/equivalence/test_scheduler.py::"
            "test_a_row_sees_the_twin_that_replaced_its_block",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M136",
        name="a prefix that this very step computes is not waited for",
        file="optimized/scheduler.py",
        old="""\
                in_progress.update(self._hashes_to_come(request))
""",
        new="""\
                pass
""",
        tests=(
            "tests/scenarios/test_engine_areas.py::"
            "test_identical_prompts_cost_one_prefill[optimized]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M137",
        name="requests are known by name that another engine had",
        file="optimized/scheduler.py",
        old="self.waiting is not self._lists[0] or ",
        new="",
        tests=("tests/equivalence/test_scheduler.py::test_replaced_lists_are_noticed",),
        source="made up for this list",
    ),
    Mutant(
        id="M138",
        name="whoever waited longest for a turn does not get it",
        file="optimized/scheduler.py",
        old="chosen.sort(key=lambda request: (request.last_step, request.admission))",
        new="chosen.sort(key=lambda request: request.admission)",
        tests=(
            "tests/equivalence/test_scheduler.py::"
            "test_more_requests_than_a_step_has_tokens_take_turns",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M139",
        name="a pinned buffer is written while its copy is under way",
        file="optimized/buffers.py",
        old="""\
            event.synchronize()
""",
        new="""\
            pass
""",
        tests=(
            "tests/gpu/test_ordering.py::test_copies_that_are_late",
            "tests/gpu/test_ordering.py::test_a_buffer_waits_for_its_last_copy",
        ),
        source="Megatron-LM#5715, vllm#36013",
        needs_gpu=True,
    ),
    Mutant(
        id="M140",
        name="experts are added up before the side stream has finished",
        file="optimized/streams.py",
        old="""\
        main.wait_stream(self._stream)
""",
        new="",
        tests=("tests/gpu/test_ordering.py::test_a_side_stream_that_is_late",),
        source="Megatron-LM#4764",
        needs_gpu=True,
    ),
    Mutant(
        id="M141",
        name="the side stream begins before its inputs are computed",
        file="optimized/streams.py",
        old="""\
        self._stream.wait_stream(main)
""",
        new="",
        tests=("tests/gpu/test_ordering.py::test_a_main_stream_that_is_late",),
        source="made up for this list",
        needs_gpu=True,
    ),
    Mutant(
        id="M142",
        name="tokens are used before they have come",
        file="optimized/engine.py",
        old="return torch.cat(parts).tolist()",
        new='return torch.cat(parts).to("cpu", non_blocking=True).tolist()',
        tests=("tests/gpu/test_ordering.py::test_draws_that_are_late",),
        source="made up for this list",
        needs_gpu=True,
    ),
    Mutant(
        id="M143",
        name="a graph holds the contexts of the step that it was captured from",
        file="optimized/graphs.py",
        old="""\
            batch = self._pad(extents.shape)
""",
        new="""\
            batch = self._pad(extents.shape)
            kept = {**vars(batch), "context_lens": batch.context_lens.clone()}
            batch = BatchMetadata(**kept)
""",
        tests=(
            "tests/gpu/test_optimized.py::"
            "test_a_replay_equals_the_eager_step[attention-float32-triton]",
        ),
        source="Megatron-LM#5791",
        needs_gpu=True,
    ),
    Mutant(
        id="M144",
        name="splits of a context are added up with maxima of their own",
        file="optimized/kernels/attention.py",
        old="fade = tl.where(is_used, tl.exp2(top - tl.max(top, 0)), 0)",
        new="fade = is_used.to(top.dtype)",
        tests=("tests/kernels/test_attention_moe.py::test_splits_do_not_show[4]",),
        source="made up for this list",
    ),
    Mutant(
        id="M145",
        name="a token's experts are weighed in the order of its pairs, turned round",
        file="optimized/kernels/moe.py",
        old="row = tl.load(places + token * TOP_K + choice, mask=is_there, other=0)",
        new="""\
other_choice = TOP_K - 1 - choice
        row = tl.load(places + token * TOP_K + other_choice, mask=is_there, other=0)""",
        tests=("tests/kernels/test_attention_moe.py::test_experts[plain-17]",),
        source="made up for this list",
    ),
    Mutant(
        id="M146",
        name="a window is stored without its newest input",
        file="optimized/kernels/conv1d.py",
        old="place = end - WINDOW + lane",
        new="place = end - 1 - WINDOW + lane",
        tests=(
            "tests/kernels/test_mamba.py::test_convolutions[True-4-5]",
            "tests/kernels/test_mamba.py::test_convolutions[False-2-0]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M147",
        name="the host waits for each graph to end",
        file="optimized/graphs.py",
        old="self._graphs[extents].replay()",
        new="self._graphs[extents].replay()\n        torch.cuda.synchronize()",
        tests=("tests/test_host_reads.py::test_every_wait_by_name_is_known",),
        source="made up for this list",
    ),
    Mutant(
        id="M148",
        name="an interrupt comes in the midst of a step",
        file="lockstep/lifecycle.py",
        old="held.append(number)",
        new="raise KeyboardInterrupt",
        tests=(
            "tests/scenarios/test_faults.py::"
            "test_an_interrupt_waits_for_the_end_of_a_step[reference]",
        ),
        source="made up for this list",
    ),
    Mutant(
        id="M149",
        name="outputs of a step that raises are lost",
        file="lockstep/lifecycle.py",
        old="self._unclaimed = record.finished",
        new="self._unclaimed = []",
        tests=(
            "tests/scenarios/test_faults.py::"
            "test_what_had_finished_when_a_step_failed_is_not_lost[optimized]",
        ),
        source="made up for this list",
    ),
)
