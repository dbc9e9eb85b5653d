"""Models in EleutherAI's lm-evaluation-harness: ``pip install 'pelton[eval]'``, then

    import lm_eval
    from pelton.serving.lm_eval import PeltonLM

    lm_eval.simple_evaluate(PeltonLM("model.engine"), tasks=["arc_easy"])

A running ``pelton serve`` answers the harness too, as its model ``local-completions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pelton.errors import MissingDependencyError

if TYPE_CHECKING:
    from pelton.serving.llm import LLM

try:
    from lm_eval.api.model import LM
except ImportError as missing:
    raise MissingDependencyError(
        "evaluating with the harness needs lm_eval: pip install 'pelton[eval]'"
    ) from missing


class PeltonLM(LM):  # type: ignore[misc]
    """The harness's three questions, answered by an ``LLM``: what ``model`` may be is said there."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__()
        from pelton.serving.llm import LLM

        self._llm: LLM = LLM(model, **options)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of (context, continuation): its log-likelihood, and whether it is what greedy decoding gives."""
        answers = []
        for context, continuation in (r.args for r in requests):
            # The harness's rule: spaces at the end of a context belong to the continuation.
            given = context.rstrip()
            whole = self._encode(context + continuation)
            first = len(self._encode(given)) if given else 0
            if first == 0:
                whole, first = [self._beginning(), *self._plain(context + continuation)], 1
            answers.append(self._score(whole, first))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of whole texts: each token given those before it, in windows of the engine's length."""
        limit = self._limit()
        totals = []
        for (text,) in (r.args for r in requests):
            tokens = [self._beginning(), *self._plain(text)]
            total, done = 0.0, 1
            while done < len(tokens):
                stop = min(len(tokens), done + limit - 1)
                # The first window has no more before it; later ones see as much as fits.
                start = max(0, stop - limit)
                total += self._score(tokens[start:stop], done - start)[0]
                done = stop
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continuations of (context, settings)."""
        answers = []
        for context, settings in (r.args for r in requests):
            stop = settings.get("until") or []
            most = int(settings.get("max_gen_toks", 256))
            tokens = self._encode(context)[-(self._limit() - most) :]
            sampled = settings.get("do_sample", False)
            params = self._llm.sampling_params(
                temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
                max_tokens=most,
                stop=tuple([stop] if isinstance(stop, str) else stop),
            )
            (output,) = self._llm.generate([tokens], params)
            answers.append(output.outputs[0].text)
        return answers

    def _encode(self, text: str) -> list[int]:
        """With what the model expects before a text."""
        return list(self._llm.tokenizer.encode(text))

    def _plain(self, text: str) -> list[int]:
        return list(self._llm.tokenizer.encode(text, add_special_tokens=False))

    def _beginning(self) -> int:
        """What stands for nothing before a text."""
        model = self._llm.config.model
        return model.eos_token_ids[0] if model.bos_token_id is None else model.bos_token_id

    def _limit(self) -> int:
        limit = self._llm.config.build.max_input_len
        assert limit
        return limit

    def _score(self, tokens: list[int], first: int) -> tuple[float, bool]:
        """Of ``tokens[first:]`` given those before; the end of what is longer than the engine's sequences."""
        cut = max(0, len(tokens) - self._limit())
        tokens, first = tokens[cut:], max(1, first - cut)
        params = self._llm.sampling_params(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        (output,) = self._llm.generate([tokens], params)
        assert output.prompt_logprobs is not None
        scored = output.prompt_logprobs[first:]
        total = sum(entry.logprobs[0] for entry in scored if entry is not None)
        return total, all(entry is not None and entry.rank == 1 for entry in scored)
