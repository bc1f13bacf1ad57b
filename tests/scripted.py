"""A model that says what a test wants, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep import LLM, EngineConfig, SamplingParams


def scripted(
    said: str | Sequence[int], side: str = "reference", **options: Any
) -> tuple[LLM, SamplingParams]:
    """Make the demo model say a text, whatever it is asked.

    Args:
        said: Text, or the very tokens.
        side: Its backend.
        options: Those of `SamplingParams`.

    Returns:
        The model, and parameters that let it say all of it, once for each prompt.
    """
    config = EngineConfig(max_requests=4, num_blocks=64)
    llm = LLM("demo", side, device="cpu", config=config, verbose=False)
    if isinstance(said, str):
        said = llm.tokenizer.encode(said, add_special_tokens=False)
    step, script = llm.engine.step, list(said)

    def forced() -> Any:
        requests = [*llm.engine.scheduler.running, *llm.engine.scheduler.waiting]
        tokens = {r.request_id: script[r.num_generated] for r in requests}
        return step(tokens=tokens)

    llm.engine.step = forced
    settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    settings |= {"max_tokens": len(script), **options}
    return llm, SamplingParams(**settings)
