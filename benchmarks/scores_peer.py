"""Process of bench_scores: score texts by datatrove's filter or by ours.

`python scores_peer.py datatrove|ours MODEL LABEL TEXTS.json OUT.json` writes the processor seconds, and how many texts
have a score of 0.5 or more.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

Judge = Callable[[list[str]], int]
_BATCH = 500  # texts that are scored together, about as many as in a pass


def datatrove_judge(model: str, label: str) -> Judge:
    """Return what counts the texts that datatrove's filter keeps."""
    Document = import_module("datatrove.data").Document
    filters = import_module("datatrove.pipeline.filters")
    # By default it joins the words around a line end; ours takes line ends for spaces.
    step = filters.FastTextClassifierFilter(
        model, keep_labels=[(label, 0.5)], save_labels_in_metadata=False, newline_replacement=" "
    )
    return lambda texts: sum(step.filter(Document(text=text, id="")) is True for text in texts)


def our_judge(model: str, label: str) -> Judge:
    """Return what counts the texts whose score is 0.5 or more."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from gristmill.steps import Batch
    from preprocessing.steps.model_score import ScoreOptions, score_step

    step = score_step("model", ScoreOptions(fasttext=model, label=label))

    def count(texts: list[str]) -> int:
        kept = 0
        for start in range(0, len(texts), _BATCH):
            scores = step.apply(Batch(tuple(texts[start : start + _BATCH]))).facts[step.fact]
            kept += int((scores >= 0.5).sum())
        return kept

    return count


def main() -> None:
    side, model, label, source, output = sys.argv[1:]
    judge = datatrove_judge(model, label) if side == "datatrove" else our_judge(model, label)
    texts = json.loads(Path(source).read_text())
    judge(["Warm up."])
    start = time.process_time()
    kept = judge(texts)
    seconds = time.process_time() - start
    Path(output).write_text(json.dumps({"seconds": seconds, "kept": kept}))


if __name__ == "__main__":
    main()
