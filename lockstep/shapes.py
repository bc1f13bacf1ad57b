"""Every tensor shape by name; signatures on both sides use these names.

Dimensions:

=================  ============================================================
tokens             tokens of one step, padded on the optimized side
requests           rows of one step: decode rows, then prefill rows
decodes, prefills  rows of each kind
hidden             model width
heads, kv_heads    attention query heads, key/value heads
head_dim           width of one attention head
mamba_heads        heads of a Mamba-2 layer; ``mamba_dim`` is the width of one
groups, state      B/C groups of a Mamba-2 layer; state size per head channel
channels           conv channels: ``mamba_heads*mamba_dim + 2*groups*state``
window             conv width less one: raw inputs that a later token still needs
blocks             block pool, with the dummy block last
slots              state pool: live slots, snapshots, zero slot, dummy slot
snapshots          states stored in one step
experts, top_k     routed experts; experts per token
expert_rows        inner width of an expert; twice that where experts are gated
=================  ============================================================
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

# Activations, token-major.
Hidden = Float[Tensor, "tokens hidden"]
Features = Float[Tensor, "tokens features"]
Inputs = Float[Tensor, "tokens inputs"]
Outputs = Float[Tensor, "tokens outputs"]
Queries = Float[Tensor, "tokens heads head_dim"]
Keys = Float[Tensor, "tokens kv_heads head_dim"]
ConvInputs = Float[Tensor, "tokens channels"]
ScanInputs = Float[Tensor, "tokens mamba_heads mamba_dim"]
TimeSteps = Float[Tensor, "tokens mamba_heads"]
StateProjections = Float[Tensor, "tokens groups state"]
Logits = Float[Tensor, "rows vocab"]

# Pools, one layer of each.
KvBlocks = Float[Tensor, "blocks block_size kv_heads head_dim"]
ConvStates = Float[Tensor, "slots channels window"]
SsmStates = Float[Tensor, "slots mamba_heads mamba_dim state"]

# Pools, all layers.
AllKvBlocks = Float[Tensor, "2 layers blocks block_size kv_heads head_dim"]
AllConvStates = Float[Tensor, "layers slots channels window"]
AllSsmStates = Float[Tensor, "layers slots mamba_heads mamba_dim state"]

# Parameters.
Weight = Float[Tensor, "outputs inputs"]
Bias = Float[Tensor, " outputs"]
NormWeight = Float[Tensor, " features"]
ConvWeight = Float[Tensor, "channels width"]
ConvBias = Float[Tensor, " channels"]
PerMambaHead = Float[Tensor, " mamba_heads"]
ExpertsUp = Float[Tensor, "experts expert_rows inputs"]
ExpertsDown = Float[Tensor, "experts inputs expert_size"]
PerExpert = Float[Tensor, " experts"]

# Routing.
ExpertIds = Int[Tensor, "tokens top_k"]
ExpertWeights = Float[Tensor, "tokens top_k"]

# Metadata.
TokenIds = Int[Tensor, " tokens"]
TokenMask = Bool[Tensor, " tokens"]
PerRequest = Int[Tensor, " requests"]
PerDecode = Int[Tensor, " decodes"]
PerPrefill = Int[Tensor, " prefills"]
PerSnapshot = Int[Tensor, " snapshots"]
PerScanChunk = Int[Tensor, " scan_chunks"]
PerRow = Int[Tensor, " rows"]
PerRowReal = Float[Tensor, " rows"]
BannedIds = Int[Tensor, "rows banned"]
BlockTables = Int[Tensor, "requests table_blocks"]
CumulativeLens = Int[Tensor, " boundaries"]
