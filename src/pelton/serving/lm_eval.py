"""Models in EleutherAI's lm-evaluation-harness: ``pip install 'pelton[eval]'``, then

    import lm_eval
    from pelton.serving.lm_eval import PeltonLM

    lm_eval.simple_evaluate(PeltonLM("model.engine"), tasks=["arc_easy"])

``pelton eval model.engine --tasks arc_easy`` does so (``harness.py``). A running ``pelton serve`` answers the
harness too, as its model ``local-completions``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from pelton.runtime.request import RequestOutput, SamplingParams
    from pelton.serving.front_end import ChatMessage
    from pelton.serving.llm import LLM

try:
    from lm_eval.api.model import LM
    from tqdm import tqdm
except ImportError as missing:
    raise MissingDependencyError(
        "evaluating with the harness needs lm_eval: pip install 'pelton[eval]'"
    ) from missing

#: Requests handed to the model together.
_AT_ONCE = 256


class PeltonLM(LM):  # type: ignore[misc]
    """The harness's three questions, answered by an ``LLM``: what ``model`` may be is said there."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__()
        from pelton.serving.llm import LLM

        self._llm: LLM = LLM(model, **options)

    def close(self) -> None:
        """Free the model; idempotent."""
        self._llm.close()

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of (context, continuation): its log-likelihood, and whether it is what greedy decoding gives."""
        asked = []
        for context, continuation in (r.args for r in requests):
            # The harness's rule: spaces at the end of a context belong to the continuation.
            given = context.rstrip()
            whole = self._encode(context + continuation)
            first = len(self._encode(given)) if given else 0
            if first == 0:
                whole, first = [self._beginning(), *self._plain(context + continuation)], 1
            asked.append((whole, first))
        return self._score(asked)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of whole texts: each token given those before it, in windows of the engine's length."""
        limit = self._limit()
        windows, owners = [], []
        for owner, (text,) in enumerate(r.args for r in requests):
            tokens = [self._beginning(), *self._plain(text)]
            done = 1
            while done < len(tokens):
                stop = min(len(tokens), done + limit - 1)
                # The first window has no more before it; later ones see as much as fits.
                start = max(0, stop - limit)
                windows.append((tokens[start:stop], done - start))
                owners.append(owner)
                done = stop
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._score(windows), strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continuations of (context, settings). Raises ``ConfigError`` where one is longer than the engine's
        prompts."""
        limit = self._limit()
        prompts, params = [], []
        for context, settings in (r.args for r in requests):
            stop = settings.get("until") or []
            most = int(settings.get("max_gen_toks", 256))
            if most >= limit:
                raise ConfigError(
                    f"a task asks for answers of {most} tokens, and the engine takes prompts of at most "
                    f"{limit}; build it with a larger --max-seq-len"
                )
            prompts.append(self._encode(context)[-(limit - most) :])
            sampled = settings.get("do_sample", False)
            params.append(
                self._llm.sampling_params(
                    temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
                    max_tokens=most,
                    stop=tuple([stop] if isinstance(stop, str) else stop),
                )
            )
        return [output.outputs[0].text for output in self._outputs(prompts, params, "answers")]

    def apply_chat_template(
        self, chat_history: Sequence[ChatMessage], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, without ``add_generation_prompt`` open at its end."""
        return self._llm._front.render_chat(chat_history, continue_final_message=not add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """What the harness files texts under."""
        return self._llm.model_id

    def _encode(self, text: str) -> list[int]:
        """With what the model expects before a text, unless (the harness's rule) a chat template wrote it."""
        begin = self._llm.tokenizer.special.bos_token
        begun = bool(begin) and text.startswith(str(begin))
        return list(self._llm.tokenizer.encode(text, add_special_tokens=not begun))

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

    def _score(self, asked: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Of (tokens, first): of ``tokens[first:]`` given those before; of what is longer than the engine's
        prompts the end."""
        limit = self._limit()
        cuts = [max(0, len(tokens) - limit) for tokens, _ in asked]
        prompts = [tokens[cut:] for (tokens, _), cut in zip(asked, cuts, strict=True)]
        params = [self._llm.sampling_params(temperature=0.0, max_tokens=1, prompt_logprobs=1)] * len(prompts)
        outputs = self._outputs(prompts, params, "log-likelihoods")
        answers = []
        for output, (_, first), cut in zip(outputs, asked, cuts, strict=True):
            assert output.prompt_logprobs is not None
            scored = output.prompt_logprobs[max(1, first - cut) :]
            total = sum(entry.logprobs[0] for entry in scored if entry is not None)
            answers.append((total, all(entry is not None and entry.rank == 1 for entry in scored)))
        return answers

    def _outputs(
        self, prompts: list[list[int]], params: list[SamplingParams], what: str
    ) -> Iterator[RequestOutput]:
        """In order. Many at once, so that they share steps; not all, for each token's entry takes memory."""
        with tqdm(total=len(prompts), desc=what) as bar:
            for i in range(0, len(prompts), _AT_ONCE):
                outputs = self._llm.generate(prompts[i : i + _AT_ONCE], params[i : i + _AT_ONCE])
                bar.update(len(outputs))
                yield from outputs
