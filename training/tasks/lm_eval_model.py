"""GristmillLM: a trained model as a model of lm_eval, which its tasks ask for likelihoods and for texts."""

import atexit
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry, register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from gristmill.errors import UsageError, require
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.generation.loop import TextGenerator
from training.generation.sampling import SamplingOptions, text_generator
from training.generation.scoring import score_continuations
from training.generation.text import Text
from training.language_model import LanguageModel, open_language_model
from training.own_code import allow_files

NAME = "gristmill"
_TOKENS = 256  # that a text may have if its task does not say
_BATCH_SIZE = 8
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


class GristmillLM(TemplateLM):
    """A LanguageModel with the methods that lm_eval calls. On several ranks each gets all requests.

    A context begins as documents did in training; an empty one is what came before a document.
    """

    def __init__(self, model: LanguageModel, batch_size: int = _BATCH_SIZE) -> None:
        super().__init__()
        self.model = model
        self.batch_size = batch_size
        self.max_length = model.config.context
        self._device = model.world.device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "GristmillLM":
        """Open the model that --model_args and further options of lm_eval describe."""
        return _open(**{**arg_dict, **(additional_config or {})})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "GristmillLM":
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return max(self.model.ends, default=self.prefix_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Return what comes before an empty context."""
        before = self.model.begins("")
        require(
            bool(before),
            "an empty context has nothing before it, as documents have neither a begin nor an end token: leave tasks "
            "out that score whole texts",
        )
        return before[-1]

    @property
    def tokenizer_name(self) -> str:
        return NAME

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        encode: Callable[[str], list[int]] = self.model.tokenizer.encode
        return encode(string) if add_special_tokens is False else self.model.begins(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a pair as lm_eval does, which moves spaces at the end of a context: one of spaces alone is empty."""
        if context.isspace():
            return self.model.begins(""), self.tok_encode(context + continuation, add_special_tokens=False)
        pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
        return pair

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        with self._progress("likelihoods", len(pairs)) as bar:
            vocab_size = self.model.config.vocab_size
            scores = score_continuations(self.model.cache, pairs, vocab_size, self.batch_size, bar.update)
        answers = [(score.log_likelihood, score.is_greedy) for score in scores]
        for (texts, _context, _continuation), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Return the log-likelihoods of continuations; without a progress bar of encoding them, which takes no time."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def _progress(self, what: str, count: int) -> tqdm:
        """Return a progress bar on the first rank's terminal."""
        return tqdm(total=count, desc=what, disable=not (self.model.world.is_main and sys.stderr.isatty()))

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Leave out the beginning of a context that is too long for the model."""
        require(
            len(continuation) <= self.max_length,
            f"a task's answer has {len(continuation)} tokens, and the model's context is {self.max_length}; leave the "
            "task out",
        )
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihood of whole texts: each token is predicted once, from those before it in its window."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            own = [make_disjoint_window(window) for window in rolling]
            windows += [(None, context, continuation) for context, continuation in own]
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        sums = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Continue contexts, each with the options of its task, up to one of its stops."""
        answers = [""] * len(requests)
        waiting: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            waiting.setdefault(repr(request.args[1]), []).append(number)
        with self._progress("texts", len(requests)) as bar:
            for numbers in waiting.values():
                numbers.sort(key=lambda number: -len(requests[number].args[0]))
                for start in range(0, len(numbers), self.batch_size):
                    batch = numbers[start : start + self.batch_size]
                    texts = self._continue([requests[number] for number in batch], batch)
                    for number, text in zip(batch, texts, strict=True):
                        answers[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(batch))
        return answers

    def _continue(self, requests: Sequence[Instance], numbers: Sequence[int]) -> list[str]:
        """Continue contexts of the same options together; `numbers` are those of their random numbers."""
        contexts = [request.args[0] for request in requests]
        options: dict[str, Any] = dict(normalize_gen_kwargs(requests[0].args[1], _TOKENS))
        stops = [stop for stop in handle_stop_sequences(options.pop("until", None), eos=None) if stop]
        limit = min(options.pop("max_gen_toks"), self.max_length // 2)
        options["temperature"] = options.get("temperature", 1.0) if options.pop("do_sample") else 0.0
        unknown = [name for name in options if name not in _SAMPLING]
        if unknown:
            raise UsageError(
                f"a task asks for {unknown[0]}, which is not known here; expected {', '.join(_SAMPLING)}, until and "
                "max_gen_toks: change its generation_kwargs"
            )
        model = self.model
        generator = TextGenerator(model.cache, SamplingOptions(**options), model.ends, model.hidden, model.agree)
        room = self.max_length - limit
        texts = [Text(model.begins(context)[-room:], limit, model.tokenizer, stops) for context in contexts]
        for _ in generator.extend(texts, [text_generator(0, number) for number in numbers]):
            pass
        # lm_eval's tasks expect the text of the new tokens alone, without a space that parts it from the context
        return [postprocess_generated_text(model.tokenizer.decode(text.tokens), stops, None) for text in texts]


def _open(
    checkpoint: str = "",
    tokenizer: str = "",
    precision: str = "fp32",
    ema: bool = False,
    code: str = "",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    batch_size: int | str | None = None,
    device: str | None = None,
    max_batch_size: int | None = None,  # noqa: ARG001  of lm_eval's --batch_size auto
    **others: Any,
) -> GristmillLM:
    """Open a checkpoint for the rest of the process, as lm_eval closes no model."""
    require(bool(checkpoint), "lm_eval's --model_args name no checkpoint; try --model_args checkpoint=OUT/model")
    known = "checkpoint, tokenizer, precision, ema, code, tp, pp, ep"
    if others:
        raise UsageError(f"lm_eval's --model_args have {next(iter(others))}; expected {known}")
    kinds: dict[str, Literal["auto", "cpu", "cuda"]] = {"cpu": "cpu", "cuda": "cuda"}
    kind = kinds.get(str(device).partition(":")[0], "auto")
    stack = ExitStack()
    atexit.register(stack.close)
    world = stack.enter_context(init_distributed(kind))
    layout = ParallelConfig(tp=tp, pp=pp, ep=ep)
    allow_files([Path(code)] if code else [])
    path = Path(tokenizer) if tokenizer else None
    model = open_language_model(Path(checkpoint), world, layout, precision, bool(ema), path)
    return GristmillLM(model, int(batch_size) if batch_size and str(batch_size).isdigit() else _BATCH_SIZE)


if NAME not in model_registry:
    register_model(NAME)(GristmillLM)
