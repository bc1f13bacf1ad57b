"""A brute-force model of the prefix cache, on tuples of tokens.

It knows no block ids, no hashes and no slots. Cached K/V is a dictionary from a prefix
of whole blocks, as a tuple of tokens, to the time when it was last let go; stored
states are a second such dictionary. What is matched, evicted and stored follows from
the definitions:

* *match*: the longest prefix of whole blocks all of whose shorter ones are cached too;
* *skip*: the longest matched prefix with a state that leaves a token to compute;
* *evict*: the prefix let go longest ago that nobody uses and that none continues.

`CacheModel.replay` reads what an engine says of a step, does the same here, and returns
what it expects the engine to have reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.blocks import BlockHash, extend_hashes
from lockstep.plan import RowKind, RowPlan
from lockstep.trace import StepRecord

#: The tokens of one or more whole blocks from position 0.
Prefix = tuple[int, ...]


class Disagreement(AssertionError):
    """The engine did what the model holds to be impossible."""


@dataclass
class User:
    """A running request, as the model sees it.

    Attributes:
        tokens: Prompt and generated tokens.
        known: Leading blocks that it uses through the cache.
        places: Blocks that it occupies in all, shared ones included.
        branch: Tokens matched at admission.
        length: Tokens that it had at admission.
        latest: Prefix whose state it stored last while it decoded.
        unreported: Positions of prompt tokens that are still to be reported.
    """

    tokens: list[int]
    known: int = 0
    places: int = 0
    branch: int = 0
    length: int = 0
    latest: Prefix | None = None
    unreported: range = range(0)

    @property
    def most_skipped(self) -> int:
        """Tokens that may be skipped, so that all is computed that is asked for.

        A token is reported from what follows the token before it.
        """
        if not self.unreported:
            return len(self.tokens) - 1
        return self.unreported.start - 1


@dataclass
class Expected:
    """What a step must have reported.

    Attributes:
        matches: Tokens matched in K/V, deepest state, and tokens skipped, by request.
        evicted_blocks: Prefixes given up.
        evicted_states: Prefixes whose state was given up.
        registered: Prefixes that entered the cache.
        stored: Prefixes whose state was stored.
        preempted: Requests that lost everything.
        shared_wishes: Prefixes whose state a second row wanted to store as well.
        twins: Prefixes computed by a row though the cache has them.
    """

    matches: dict[str, tuple[int, int, int]] = field(
        default_factory=dict[str, tuple[int, int, int]]
    )
    evicted_blocks: list[Prefix] = field(default_factory=list[Prefix])
    evicted_states: list[Prefix] = field(default_factory=list[Prefix])
    registered: list[Prefix] = field(default_factory=list[Prefix])
    stored: list[Prefix] = field(default_factory=list[Prefix])
    preempted: list[str] = field(default_factory=list[str])
    shared_wishes: list[Prefix] = field(default_factory=list[Prefix])
    twins: list[Prefix] = field(default_factory=list[Prefix])


class CacheModel:
    """What a prefix cache of a given size must hold after each event."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        snapshot_slots: int,
        forgets_unused: bool,
        has_states: bool,
        enabled: bool = True,
    ) -> None:
        """Begin empty.

        Args:
            num_blocks: Blocks there are.
            block_size: Tokens in a block.
            snapshot_slots: States that can be stored.
            forgets_unused: Whether a prefix is gone when its last user lets go.
            has_states: Whether a prefix can be skipped only up to a stored state.
            enabled: Whether anything is kept at all.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.snapshot_slots = snapshot_slots
        self.forgets_unused = forgets_unused
        self.has_states = has_states
        self.enabled = enabled
        self.kv: dict[Prefix, int] = {}
        self.states: dict[Prefix, int] = {}
        self.replaceable: set[Prefix] = set()
        self.users: dict[str, User] = {}
        self.queue: dict[str, User] = {}
        self.names: dict[BlockHash, Prefix] = {}
        self.time = 0

    # Requests come and go.

    def arrive(
        self, request_id: str, prompt: Sequence[int], first_reported: int | None = None
    ) -> None:
        """Note a request that enters the queue.

        Args:
            request_id: The request.
            prompt: Its prompt.
            first_reported: First prompt token whose log-probability it asks for.
        """
        user = self.queue[request_id] = User(list(prompt))
        if first_reported is not None:
            # Nothing is before the first token, so nothing can be reported of it.
            user.unreported = range(max(first_reported, 1), len(prompt))
        self._name(prompt)

    def leave(self, request_id: str) -> None:
        """Note that a request ended, wherever it was."""
        if request_id in self.users:
            self._let_go(self.users.pop(request_id))
        else:
            self.queue.pop(request_id)

    def forget_all(self) -> None:
        """Note that all content was dropped."""
        self.kv.clear()
        self.states.clear()

    # The definitions.

    def prefixes(self, tokens: Sequence[int], count: int | None = None) -> list[Prefix]:
        """List the prefixes of whole blocks, shortest first."""
        count = len(tokens) // self.block_size if count is None else count
        ends = range(self.block_size, count * self.block_size + 1, self.block_size)
        return [tuple(tokens[:end]) for end in ends]

    def match(
        self, tokens: Sequence[int], most: int | None = None
    ) -> tuple[int, int, int]:
        """Return tokens matched in K/V, depth of the deepest state, tokens skipped.

        Args:
            tokens: Prompt and generated tokens.
            most: Most tokens that may be skipped; all but the last when None.
        """
        most = len(tokens) - 1 if most is None else most
        if not self.enabled:
            return 0, 0, 0
        matched: list[Prefix] = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.kv:
                break
            matched.append(prefix)
        kv = len(matched) * self.block_size
        if not self.has_states:
            return kv, kv, min(kv, most)
        depths = [len(prefix) for prefix in matched if prefix in self.states]
        skip = max((depth for depth in depths if depth <= most), default=0)
        return kv, max(depths, default=0), skip

    def users_of(self, prefix: Prefix) -> int:
        """Count the running requests that use a cached prefix."""
        return sum(
            len(prefix) <= user.known * self.block_size
            and tuple(user.tokens[: len(prefix)]) == prefix
            for user in self.users.values()
        )

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        private = sum(user.places - user.known for user in self.users.values())
        return self.num_blocks - len(self.kv) - private

    @property
    def available(self) -> int:
        """Blocks that are free or can become so."""
        return self.free + sum(not self.users_of(prefix) for prefix in self.kv)

    def evict(self, expected: Expected) -> None:
        """Give up the prefix longest unused that nobody uses and none continues."""
        continued = {prefix[: -self.block_size] for prefix in self.kv}
        candidates = [
            prefix
            for prefix in self.kv
            if not self.users_of(prefix) and prefix not in continued
        ]
        loser = min(candidates, key=lambda prefix: self.kv[prefix])
        del self.kv[loser]
        expected.evicted_blocks.append(loser)
        if self.states.pop(loser, None) is not None:
            expected.evicted_states.append(loser)

    # One step.

    def replay(self, record: StepRecord) -> Expected:
        """Do here what a step did, and say what it must have reported."""
        expected = Expected()
        wishes = _Wishes(self, expected)
        for row in record.rows:
            if row.kind is RowKind.DECODE:
                self._decode(row, wishes, expected)
        self._preempt_the_rest(record, expected)
        for row in record.rows:
            if row.kind is RowKind.PREFILL:
                self._prefill(row, wishes, expected)
        for row in record.rows:
            self._publish(row, wishes, expected)
        for row in record.rows:
            user = self.users[row.request_id]
            first = max(user.unreported.start, row.end + 1)
            user.unreported = range(first, user.unreported.stop)
        for request_id, token in record.tokens.items():
            tokens = self.users[request_id].tokens
            tokens.append(token)
            if len(tokens) % self.block_size == 0:
                self._name(tokens)
        for output in record.finished:
            self.leave(output.request_id)
        return expected

    def _decode(self, row: RowPlan, wishes: _Wishes, expected: Expected) -> None:
        user = self.users[row.request_id]
        while user.places * self.block_size <= row.start and not self.available:
            victim = list(self.users)[-1]
            _require(victim != row.request_id, f"{victim} decodes without a block")
            self._preempt(victim, expected)
        if user.places * self.block_size <= row.start:
            self._take(user, 1, expected)
        if row.end % self.block_size == 0:
            prefix = tuple(user.tokens[: row.end])
            latest = user.latest
            if latest in self.replaceable and latest not in wishes.being_read:
                self.states.pop(latest, None)
            granted = wishes.grant(prefix, row.request_id, replaceable=True)
            user.latest = prefix if granted else None

    def _preempt_the_rest(self, record: StepRecord, expected: Expected) -> None:
        """Preempt those that gave up their own place, since no other was later."""
        for request_id in record.plan.preempted[len(expected.preempted) :]:
            _require(not self.available, f"{request_id} was preempted without need")
            self._preempt(request_id, expected)

    def _preempt(self, request_id: str, expected: Expected) -> None:
        _require(
            request_id == list(self.users)[-1],
            f"{request_id} was preempted; {list(self.users)[-1]} came later",
        )
        user = self.users.pop(request_id)
        self._let_go(user)
        self.queue[request_id] = User(
            user.tokens, latest=user.latest, unreported=user.unreported
        )
        expected.preempted.append(request_id)

    def _prefill(self, row: RowPlan, wishes: _Wishes, expected: Expected) -> None:
        if row.request_id in self.queue:
            self._admit(row, wishes, expected)
        user = self.users[row.request_id]
        for position in self._wanted(user, row):
            wishes.grant(tuple(user.tokens[:position]), row.request_id)

    def _admit(self, row: RowPlan, wishes: _Wishes, expected: Expected) -> None:
        user = self.queue.pop(row.request_id)
        matched, deepest, skip = self.match(user.tokens, user.most_skipped)
        expected.matches[row.request_id] = matched, deepest, skip
        user.length = len(user.tokens)
        user.branch = matched
        user.known = user.places = matched // self.block_size
        # Using the match before anything is taken is what keeps it from being evicted.
        self.users[row.request_id] = user
        needed = -(-user.length // self.block_size) - user.places
        _require(needed <= self.available, f"{row.request_id} came in without room")
        self._take(user, needed, expected)
        if self.has_states and skip:
            wishes.read(tuple(user.tokens[:skip]), row.request_id)

    def _wanted(self, user: User, row: RowPlan) -> list[int]:
        """List the positions whose state a slice should leave behind, best first.

        The prompt's last boundary; where it left what was cached; the slice's own end;
        and the last boundary before its last token.
        """
        size = self.block_size
        last = user.length - user.length % size
        before_last = (user.length - 1) // size * size
        found: list[int] = []
        for position in (last, user.branch, row.end, before_last):
            inside = row.start < position <= row.end and position % size == 0
            if inside and position not in found:
                found.append(position)
        return found

    def _publish(self, row: RowPlan, wishes: _Wishes, expected: Expected) -> None:
        user = self.users[row.request_id]
        if self.enabled:
            for prefix in self.prefixes(user.tokens, row.end // self.block_size):
                if len(prefix) <= user.known * self.block_size:
                    continue
                user.known += 1
                if prefix in self.kv:
                    # Somebody else's copy is used from now on; its own is free.
                    expected.twins.append(prefix)
                else:
                    self.kv[prefix] = self.time
                    expected.registered.append(prefix)
        mine = [p for p, owner in wishes.granted.items() if owner == row.request_id]
        for prefix in sorted(mine, key=len):
            self._touch(prefix)
            expected.stored.append(prefix)
        if row.request_id in wishes.readers:
            self._touch(wishes.readers[row.request_id])

    def _touch(self, prefix: Prefix) -> None:
        self.time += 1
        self.states[prefix] = self.time

    def _take(self, user: User, count: int, expected: Expected) -> None:
        while self.free < count:
            self.evict(expected)
        user.places += count

    def _let_go(self, user: User) -> None:
        self.time += 1
        for prefix in reversed(self.prefixes(user.tokens, user.known)):
            if self.users_of(prefix):
                continue
            if self.forgets_unused:
                del self.kv[prefix]
                self.states.pop(prefix, None)
            else:
                self.kv[prefix] = self.time

    # Comparison with an engine.

    def _name(self, tokens: Sequence[int]) -> None:
        """Remember under which hashes the prefixes of some tokens go."""
        hashes: list[BlockHash] = []
        extend_hashes(hashes, tokens, self.block_size)
        self.names.update(zip(hashes, self.prefixes(tokens), strict=True))

    def spell(self, hashes: Sequence[BlockHash]) -> list[Prefix]:
        """Translate hashes into the prefixes that they stand for."""
        return [self.names[block_hash] for block_hash in hashes]


class _Wishes:
    """The states that the rows of one step read, and those that they will store."""

    def __init__(self, model: CacheModel, expected: Expected) -> None:
        self.model = model
        self.expected = expected
        self.granted: dict[Prefix, str] = {}
        self.readers: dict[str, Prefix] = {}

    @property
    def being_read(self) -> set[Prefix]:
        """States that must outlive the step."""
        return set(self.readers.values())

    def read(self, prefix: Prefix, request_id: str) -> None:
        """Note that a row starts from a state."""
        self.readers[request_id] = prefix

    def grant(self, prefix: Prefix, request_id: str, replaceable: bool = False) -> bool:
        """Say whether a row may store a state; makes room by recency of use.

        A state that a second row wants is kept when the first one moves on.
        """
        model = self.model
        if prefix in self.granted or prefix in model.states:
            model.replaceable.discard(prefix)
        if not (model.enabled and model.has_states):
            return False
        if prefix in self.granted:
            self.expected.shared_wishes.append(prefix)
            return False
        if prefix in model.states:
            return False
        if len(model.states) + len(self.granted) >= model.snapshot_slots:
            idle = [p for p in model.states if p not in self.being_read]
            if not idle:
                return False
            loser = min(idle, key=lambda p: model.states[p])
            del model.states[loser]
            self.expected.evicted_states.append(loser)
        self.granted[prefix] = request_id
        if replaceable:
            model.replaceable.add(prefix)
        else:
            model.replaceable.discard(prefix)
        return True


def _require(condition: object, message: str) -> None:
    if not condition:
        raise Disagreement(message)


def assert_agrees(model: CacheModel, engine: object, record: StepRecord) -> Expected:
    """Replay a step in the model and hold the engine's report and content to it."""
    expected = model.replay(record)
    plan = record.plan
    assert plan.preempted == expected.preempted
    assert model.spell(plan.evicted_blocks) == expected.evicted_blocks
    assert model.spell(plan.evicted_states) == expected.evicted_states
    assert model.spell(record.registered_blocks) == expected.registered
    assert model.spell(record.stored_states) == expected.stored
    reported = {
        row.request_id: (
            row.cache.matched_kv_tokens,
            row.cache.matched_state_tokens,
            row.cache.num_skipped_tokens,
        )
        for row in record.rows
        if row.cache is not None
    }
    assert reported == expected.matches
    starts = {row.request_id: row.start for row in record.rows if row.cache}
    assert starts == {name: skip for name, (_, _, skip) in expected.matches.items()}
    assert_same_content(model, engine)
    return expected


def assert_same_content(model: CacheModel, engine: object) -> None:
    """Hold what an engine keeps to what the model keeps."""
    state = engine.export_state()  # type: ignore[attr-defined]
    blocks, slots = state.blocks, state.slots
    assert set(model.spell(list(blocks.hashes.values()))) == set(model.kv)
    assert set(model.spell(list(slots.stored))) == set(model.states)
    assert len(blocks.free) == model.free
    assert len(slots.free_snapshots) == model.snapshot_slots - len(model.states)
