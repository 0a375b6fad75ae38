"""`gristmill run` with one mistake in its configuration: refused before any file is written or process started."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from dedup.candidates.signature_shards import SUFFIX, write_shard
from dedup.minhash.signatures import Sketch
from gristmill.config import option_types
from gristmill.errors import UsageError
from gristmill.io.files import RUN_FILE, STATE_DIR
from gristmill_cli import run_check
from gristmill_cli.run import check_run, main
from gristmill_cli.run_config import Normalize, RunConfig
from preprocessing.steps.normalise import check_ftfy
from tests.gristmill.engine.opens import count_opens, count_processes
from tests.gristmill_cli.corpus import ROOT, run_arguments
from tests.tokenizers_of_models import content_of

MISTAKES = [  # section, key, value, and what the message must say
    ("", "seed", "-1", "expected a whole number from 0"),
    ("", "seed", "4294967296", "expected a whole number from 0"),
    ("", "seed", "one", "expected"),
    ("", "workers", "0", "--workers 0: expected 1 or more"),
    ("", "workers", "-2", "expected 1 or more"),
    ("", "memory", "0", "--memory '0' is not a size: expected"),
    ("", "memory", "lots", "--memory 'lots' is not a size: expected"),
    ("", "memory", "-1GiB", "is not a size: expected"),
    ("", "memory", "nan", "is not a size: expected"),
    ("", "max_malformed", "nan", "expected a fraction from 0 to 1"),
    ("", "max_malformed", "2", "expected a fraction from 0 to 1"),
    ("", "max_malformed", "-1", "expected a fraction from 0 to 1"),
    ("", "corpus", "{folder}/nowhere", "nowhere: expected a folder, but there is none"),
    ("", "corpus", "{folder}/corpus/a/a.jsonl", "expected a folder, got a file"),
    ("", "corpus", "{folder}/empty", "holds no corpus file: expected"),
    ("", "out", "{folder}/corpus", "--out next to the corpus"),
    ("", "out", "{folder}/corpus/out", "--out next to the corpus"),
    ("", "out", "{folder}", "--out next to the corpus"),
    ("", "out", "{folder}/file", "a file of that name exists where a folder is expected"),
    ("", "out", "{folder}/file/out", "is a file, not a folder"),
    ("", "out", "{folder}/link", "/link is a link to nowhere, which does not exist: create that folder, or"),
    ("", "out", "{folder}/link/out", "/link is a link to nowhere, which does not exist"),
    ("", "steps", "my_rules:keep", "--steps: expected tables [[steps]] in a file; try --config FILE"),
    ("", "sources", "a column", "--sources.a]: expected a table, got"),
    ("", "scores", "edu.bin", "--scores: expected"),
    ("", "from", "tokenise", "expected"),
    ("", "from", "to_hash", "--from to_hash: normalize_text has not finished: give --from normalize_text"),
    ("", "until", "nowhere", "expected one of normalize_text, filter, generate_exact_pairs, to_hash, "),
    ("", "until", "generate_exact_pairs --dedup.exact false", "expected one of normalize_text, filter, to_hash"),
    ("", "until", "filter --from mix", "expected stages in the order of the run"),
    ("", "scratch", "{folder}/file", "/file: expected a folder, got a file"),
    ("", "scratch", "/dev/null", "--scratch /dev/null: expected a folder, got a file"),
    ("", "scratch", "{folder}/corpus/a", "lies in --corpus"),
    ("", "scratch_size", "lots", "--scratch_size 'lots' is not a size: expected"),
    ("", "scratch_size", "2GiB", "--scratch_size 2GiB has no effect: it limits copies of files in a bucket"),
    ("", "shard", "9/3", "--shard 9/3: expected i/n"),
    ("", "executor", "slurm", "expected"),
    ("", "address", "127.0.0.1:6379", "only --executor ray connects to a cluster"),
    ("", "dry_run", "maybe", "expected"),
    ("", "accept_versions", "maybe", "expected"),
    ("", "explain", "maybe", "expected"),
    ("", "explain_tasks", "maybe", "expected"),
    ("", "strict", "maybe", "expected"),
    ("", "max_failed", "2", "--max_failed 2.0: expected a fraction of 0 or more and less than 1"),
    ("", "max_failed", "nan", "expected a fraction of 0 or more and less than 1"),
    ("", "retry_failed", "maybe", "expected"),
    ("", "remove_used", "maybe", "expected"),
    ("", "keep", "everything", "expected"),
    ("", "keep_list", "{folder}/nowhere", "nowhere"),
    ("", "keep_list", "{folder}/corpus/a/a.jsonl", "a.jsonl, line 1: expected keep KEY, drop KEY or drop sha256"),
    ("normalize", "ftfy", "perhaps", "expected"),
    ("alarms", "source_loss", "50", "--alarms.source_loss 50.0: expected a number from 0 to 1; 0 is no limit"),
    ("alarms", "times_median", "-1", "expected a number from 0; 0 is"),
    ("alarms", "cluster", "-1", "expected a number from 0"),
    ("alarms", "alike", "nan", "expected a number from 0 to 1"),
    ("alarms", "length", "-1", "expected a number from 0"),
    ("alarms", "bytes_a_token", "-1", "expected a number from 0"),
    ("alarms", "language", "2", "expected a number from 0 to 1"),
    ("alarms", "mix", "nan", "expected a number from 0"),
    ("alarms", "idle_rule", "-1", "expected a number from 0"),
    ("alarms", "score", "2", "--alarms.score 2.0: expected a number from 0 to 1; 0 is no limit"),
    ("", "recipe", "gofer", "did you mean gopher?"),
    ("", "recipe", "nowhere.toml", "got: No such file or directory; check the path"),
    ("lines", "unit", "word", "expected"),
    ("lines", "keep", "last --lines.unit line", "expected"),
    ("lines", "min_count", "1 --lines.unit line", "--lines.min_count: expected 2 or more, got 1; try 6"),
    ("lines", "min_count", "3", "--lines.min_count has no effect with --lines.unit none; try --lines.unit line"),
    ("lines", "min_characters", "-1 --lines.unit line", "--lines.min_characters: expected 0 or more, got -1"),
    ("lines", "scope", "local", "expected"),
    ("lines", "count_by", "page --lines.unit line", "expected"),
    ("lines", "leave_alone", "codes --lines.unit line", "--lines.leave_alone: expected sources of the corpus, got"),
    ("spans", "min", "15", "--spans.min 15: expected 16 to 1,048,576 bytes"),
    ("spans", "keep", "last --spans.min 100", "expected"),
    ("spans", "min_left", "3", "--spans.min_left has no effect without --spans.min; try --spans.min 100"),
    ("spans", "min_share", "2 --spans.min 100", "--spans.min_share 2.0: expected a share from 0 to 1; try 0.2"),
    ("spans", "leave_alone", "codes --spans.min 100", "--spans.leave_alone: expected sources of the corpus, got"),
    ("decontaminate", "against", "{folder}/nowhere", "nowhere: expected a file or a folder"),
    ("decontaminate", "template", "{text}", "--decontaminate.template has no effect without --decontaminate.against"),
    (
        "decontaminate",
        "against",
        "{folder}/corpus/a",
        "so items of the benchmark would also be read as documents: move",
    ),
    ("decontaminate", "policy", "forget", "expected"),
    ("decontaminate", "margin", "-1 --decontaminate.against {folder}/corpus", ".margin: expected 0 or more, got -1"),
    ("decontaminate", "min_ngrams", "0 --decontaminate.against {folder}/corpus", "expected 1 or more, got 0"),
    ("decontaminate", "near", "2 --decontaminate.against {folder}/corpus", ".near: expected 0, or a share of 0.5 to 1"),
    ("decontaminate", "common", "-1 --decontaminate.against {folder}/corpus", ".common: expected 0 or more, got -1"),
    ("apply", "function", "no_such_module_here:f", "[apply] there is no module 'no_such_module_here'"),
    ("apply", "function", "keep_english", "expected module:function"),
    ("apply", "function", "json:keep_english", "has no function 'keep_english'"),
    ("", "text_column", "gristmill_key", "would overwrite the texts with keys of documents"),
    ("", "text_column", "", "expected the name of a column"),
    ("normalize", "read_also", "pdf", "--normalize.read_also pdf: expected one of txt, md, html, csv, tsv"),
    ("filter", "threshold", "-1", "expected 0 or more characters"),
    ("filter", "threshold", "2.5", "expected"),
    ("normalize", "skip_odd_names", "maybe", "expected"),
    ("normalize", "extract", "some", "expected"),
    ("filter", "unit", "token", "expected"),
    ("chats", "path", "{folder}/corpus", "needs a chat template; try --chats.template FILE, or --tokenizer.file"),
    ("chats", "messages", "turns", "--chats.messages has no effect without --chats.path"),
    ("chats", "template", "llama", "--chats.template has no effect without --chats.path"),
    ("dedup", "hash", "md5", "expected"),
    ("dedup", "unit", "letter", "expected"),
    ("dedup", "width", "0", "expected shingles of 1"),
    ("dedup", "permutations", "0", "expected 1 to 4096"),
    ("dedup", "permutations", "5000", "expected 1 to 4096"),
    ("dedup", "seed", "-1", "expected 0 to"),
    ("dedup", "seed", "4294967296", "expected 0 to"),
    ("dedup", "range", "0", "expected at least 1 × 1"),
    ("dedup", "bands", "0", "expected at least 1 × 1"),
    ("dedup", "bands", "20", "--dedup.range 13 × --dedup.bands 20 = 260 rows: expected"),
    ("dedup", "scope", "local", "expected"),
    ("dedup", "index", "{folder}/nowhere", "nowhere: expected the folder that to_hash wrote to"),
    ("dedup", "index", "{folder}/corpus", "holds no signature shard"),
    (
        "dedup",
        "index",
        "{folder}/past",
        "/past is the output of a run; expected its signatures: try --dedup.index past=",
    ),
    ("dedup", "index", "", "--dedup.index '': expected a folder of shards"),
    ("dedup", "index", "old=", "--dedup.index old=: expected a folder of shards"),
    ("dedup", "index", "a:b={folder}/index", "expected a folder of shards, or NAME=FOLDER"),
    ("dedup", "index", "{folder}/index", "permutations, seed 9; the options ask for"),
    ("dedup", "index", "{folder}/out/minhash", "are of the corpus itself"),
    ("dedup", "exact", "sometimes", "expected"),
    ("dedup", "keep", "nonsense", "--dedup.keep nonsense: expected one of first, longest"),
    ("dedup", "keep", "newest:", "expected one of"),
    ("dedup", "keep", "source:", "expected one of"),
    ("dedup", "keep", "source:a,nonexist", "names 'nonexist': the corpus has the sources 'a', 'b, c'"),
    ("dedup", "verify", "cosine", "expected"),
    ("dedup", "threshold", "nan", "expected a similarity above 0"),
    ("dedup", "threshold", "2", "expected a similarity above 0"),
    ("dedup", "threshold", "0", "expected a similarity above 0"),
    ("dedup", "threshold", "0.5 --dedup.verify none --dedup.bands 8", "--dedup.threshold 0.5 has no effect"),
    ("mix", "weights", "nonexist 2", "names 'nonexist': the corpus has the sources 'a', 'b, c'"),
    ("mix", "weights", "a -1", "expected a number of epochs"),
    ("mix", "weights", "a nan", "expected a number of epochs"),
    ("mix", "weights", "a inf", "expected a number of epochs"),
    ("mix", "weights", "a many", "--mix.weights a: expected a number such as 20000 or 2e9, got 'many'"),
    ("mix", "bytes", "nonexist 2e9", "--mix.bytes names 'nonexist': the corpus has the sources 'a', 'b, c'"),
    ("mix", "bytes", "a 0", "--mix.bytes a=0: expected a number of bytes above 0, such as 2e9"),
    ("mix", "bytes", "a -1", "expected a number of bytes above 0"),
    ("mix", "bytes", "a nan", "expected a number of bytes above 0"),
    ("mix", "bytes", "a 1e3 --mix.weights a 2", "--mix.bytes and --mix.weights are both given: expected one of them"),
    (
        "mix",
        "bytes",
        "a 1e3 --mix.tokens a 1e3 --tokenizer.file {folder}/t.json",
        "--mix.bytes and --mix.tokens are both",
    ),
    ("mix", "tokens", "a 1e3", "needs a tokenizer that is there before the mix: expected --tokenizer.file"),
    ("mix", "tokens", "a 0 --tokenizer.file {folder}/t.json", "--mix.tokens a=0: expected a number of tokens above 0"),
    ("mix", "holdout", "2", "--mix.holdout 2.0: expected a fraction"),
    ("mix", "holdout", "1", "expected a fraction"),
    ("mix", "holdout", "nan", "expected a fraction"),
    ("mix", "holdout", "-1", "expected a fraction"),
    ("mix", "seed", "-1", "expected a whole number from 0"),
    ("tokenizer", "file", "{folder}/nowhere", "expected a tokenizer, but there is no such file; give"),
    ("tokenizer", "file", "{folder}/file", "/file is no tokenizer"),
    (
        "tokenizer",
        "file",
        "{folder}/t.json --tokenizer.eos <s>",
        "'<s>' is not in its vocabulary; give --tokenizer.eos TOKEN",
    ),
    ("tokenizer", "file", "{folder}/t.json --tokenizer.vocab_size 999", "--tokenizer.vocab_size has no effect with"),
    (
        "tokenizer",
        "bos",
        "<|x|>",
        "--tokenizer.bos <|x|>: a tokenizer of --tokenizer.model_type bpe has the special tokens <s>, </s>",
    ),
    ("tokenizer", "eos", "nope", "expected one of them, none, or model"),
    ("tokenizer", "bos", "model --tokenizer.model_type byte-bpe", "expected one of them, none"),
    ("tokenizer", "vocab_size", "259", "expected more than the 259 pieces"),
    ("tokenizer", "vocab_size", "2000000", "and at most 1,048,576"),
    ("tokenizer", "model_type", "wordpiece", "expected"),
    ("tokenizer", "sample", "0", "--tokenizer.sample '0' is not a size: expected"),
    ("tokenizer", "sample", "nonsense", "--tokenizer.sample 'nonsense' is not a size: expected"),
    ("tokenizer", "sample", "1KiB", "a sample has fewer pieces than bytes: give"),
    ("tokenizer", "exact", "almost", "expected"),
    ("tokenizer", "shard_size", "0", "--tokenizer.shard_size '0' is not a size: expected"),
    ("tokenizer", "seed", "4294967296", "expected a whole number from 0"),
]
IN_FILE = {  # text of the configuration file: what the message must say
    "seed = 'one'": "seed: expected a whole number, got 'one'",
    "memory = 4": "memory: expected a text, got 4",
    "[mix]\nholdout = 'much'": "mix.holdout: expected a number, got 'much'",
    "[mix]\nholdout = nan": "--mix.holdout nan: expected",
    "[mix.weights]\na = 'twice'": "mix.weights a: expected a number such as 20000 or 2e9, got 'twice'",
    "[mix.weights]\n'b, d' = 2": "names 'b, d'",
    "[mix.weights]\na = 0\n'b, c' = 0": "--mix.weights leaves out every source: expected",
    "mix = 2": "expected a table [mix]",
    "[sources.a]\ncolum = 'x'": "sources.a: unknown key colum; did you mean column?",
    "[sources.a]\nextract = 'everything'": "run.toml: [sources.a] extract: expected main or all, got 'everything'",
    "[sources]\na = 'x'": "run.toml: [sources.a]: expected a table, got 'x'",
    "[[steps]]\nkeep = 'os:getcwd'\nfields = 'url'": "[[steps]] number 1 fields: expected a list of texts, got",
    "[decontaminate]\nagainst = 'a.jsonl'": "decontaminate.against: expected a list of paths, got 'a.jsonl'; try [",
    "[sources.c]\ncolumn = 'x'": "corpus/c: expected a folder, but there is none",
    "[sources.a]\nweight = 1\n[mix.weights]\na = 2": "'a' has a weight in [sources] and in [mix.weights]: give one",
    "[sources.a]\n[normalize]\nread_also = ['txt']": "--normalize.read_also has no effect with [sources]",
    "[[steps]]\nkep = 'a:b'": "steps: unknown key kep; did you mean keep?",
    "[[steps]]\nmin = 0.5": "[[steps]]: expected one of keep, score and rewrite, such as",
    "[[steps]]\nkeep = 'a:b'\nscore = 'a:b'": "keep = 'my_rules:keep', got keep and score",
    "[[steps]]\nkeep = 'os:getcwd'\nmin = 1": "min and max are limits of a score; keep = 'os:getcwd' has none",
    "[[steps]]\nkeep = 'no_such_module_here:f'": "there is no module 'no_such_module_here': expected",
    "[[steps]]\nkeep = 'os:getcwd'\n[[steps]]\nkeep = 'os:getcwd'": "two steps are named 'getcwd'",
    "[scores.edu]\nfastext = 'a.bin'": "scores.edu: unknown key fastext; did you mean fasttext?",
    "[scores.edu]\nmin = 0.5": "[scores.edu]: expected one of fasttext, transformers, function, measure and mean_of",
    "[scores.edu]\nfasttext = 'none.bin'\nlabel = 'hq'": "none.bin: expected a fastText model, and there is no such",
    "[dedup]\nindex = 'minhash'": "dedup.index: expected a list of texts",
    "[dedup]\nhash = 'md5'": "dedup.hash: expected one of xxh32, sha1",
    "[dedup]\nbands = true": "dedup.bands: expected a whole number, got True",
    "[dedup]\nbnads = 9": "unknown key dedup.bnads; did you mean dedup.bands?",
    "[tokeniser]\nexact = true": "unknown key tokeniser; did you mean tokenizer?",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two sources, an empty folder, a file, and an index of signatures made with seed 9."""
    folder = tmp_path_factory.mktemp("mistakes")
    for source in ("a", "b, c"):
        (folder / "corpus" / source).mkdir(parents=True)
        (folder / "corpus" / source / "a.jsonl").write_text('{"text": "a document"}\n')
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    (folder / "t.json").write_text(content_of("GPT-2"))
    (folder / "link").symlink_to("nowhere")
    for part in (".gristmill/run", "minhash"):
        (folder / "past" / part).mkdir(parents=True)
    with write_shard(folder / "index" / f"a{SUFFIX}", "a/a.jsonl", Sketch(seed=9)) as shard:
        shard.add([0], np.zeros((1, 128), np.uint32))
    return folder


def exit_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of a command, and what it printed as warnings or errors."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(str(end.value)), " ".join(capsys.readouterr().err.split())


def refused(folder: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and message of a run that must write nothing, start no process, and open each file once at most."""
    before = {*folder.rglob("*")}
    with pytest.raises(SystemExit) as end, count_opens(folder) as opens, count_processes() as processes:
        main(["--corpus", f"{folder}/corpus", "--out", f"{folder}/out", *arguments])
    assert processes == [] and max(opens.values(), default=0) <= 1, (processes, opens)
    assert {*folder.rglob("*")} == before
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    return int(str(end.value)), " ".join(message.split())


@pytest.mark.parametrize(
    ("later", "wanted"),
    [({"text": "x"}, "line 2: no prompt, only text"), ({"prompt": "too short"}, "got none in quiz (2 records)")],
)
def test_a_benchmark_is_read_to_its_end_before_anything_is_written(folder, tmp_path, capsys, later, wanted) -> None:
    quiz = tmp_path / "quiz.jsonl"
    quiz.write_text("".join(f"{json.dumps(record)}\n" for record in ({"prompt": "short"}, later)))
    against = ("--decontaminate.against", str(quiz), "--decontaminate.template", "{prompt}")
    code, message = refused(folder, *against, capsys=capsys)
    assert code == 1 and wanted in message and "--decontaminate.template" in message


@pytest.mark.parametrize(("section", "key", "value", "wanted"), MISTAKES)
def test_a_wrong_option_is_refused_before_anything_is_written(folder, capsys, section, key, value, wanted) -> None:
    option = f"--{section}.{key}" if section else f"--{key}"
    values = value.replace("{folder}", str(folder)).split() or [""]
    code, message = refused(folder, option, *values, capsys=capsys)
    assert code == (1 if "cannot write" in message else 2)
    assert any(text in message for text in wanted.split("|")), message


@pytest.mark.parametrize(("text", "wanted"), IN_FILE.items())
def test_a_wrong_key_of_the_file_is_refused(folder, tmp_path, capsys, text, wanted) -> None:
    (tmp_path / "run.toml").write_text(text)
    code, message = refused(folder, "--config", str(tmp_path / "run.toml"), capsys=capsys)
    assert code == 2 and wanted in message


def test_a_file_that_is_not_toml_is_refused(folder, tmp_path, capsys) -> None:
    (tmp_path / "run.toml").write_text("[mix\n")
    code, message = refused(folder, "--config", str(tmp_path / "run.toml"), capsys=capsys)
    assert code == 2 and "invalid TOML" in message


def test_a_corpus_given_as_a_file_of_options_is_told_its_option(folder, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(folder / "corpus")])
    assert (
        end.value.code == 2 and f"try gristmill run --corpus {folder / 'corpus'} --out OUT" in capsys.readouterr().err
    )


def test_every_option_of_the_configuration_has_a_mistake_in_the_table() -> None:
    covered = {f"--{section}.{key}" if section else f"--{key}" for section, key, _, _ in MISTAKES}
    assert covered == {*option_types(RunConfig)}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which even root can write nothing")
def test_a_folder_without_permission_is_named(tmp_path, folder, capsys) -> None:
    code, message = refused(folder, "--out", "/proc/gristmill", capsys=capsys)
    assert code == 1 and "cannot write /proc/gristmill" in message


@pytest.mark.parametrize(("option", "wanted"), [("--out", "no permission to write"), ("--scratch", "cannot read")])
def test_a_folder_of_another_user_is_named(folder, capsys, monkeypatch, option, wanted) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:  # root may search every folder
        if "private" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    code, message = refused(folder, option, "{folder}/private/a", capsys=capsys)
    assert code == 1 and wanted in message and "/private/a: " in message


@pytest.mark.parametrize("name", ["run.json", "funnel.json"])
def test_a_file_of_the_user_with_the_name_of_one_of_a_run_is_not_overwritten(tmp_path, folder, capsys, name) -> None:
    (tmp_path / name).write_text('{"my": "notes"}')
    code, message = refused(folder, "--out", str(tmp_path), capsys=capsys)
    assert code == 1 and f"{name} exists, and gristmill run did not write it: it would be overwritten" in message
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("looks", ["is_folder", "is_file"])
def test_a_run_that_begins_while_another_looks_is_not_taken_for_a_user_s_files(tmp_path, folder, monkeypatch, looks):
    look, out, begun = getattr(run_check, looks), tmp_path / "out", list[bool]()

    def look_and_begin(path: Path) -> bool:
        """The other process makes its lock, then the record, after this one has looked."""
        found = look(path)
        if not begun:
            begun.append(True)
            (out / STATE_DIR).mkdir(parents=True)
            (out / STATE_DIR / "run.lock").touch()
            (out / RUN_FILE).write_text(json.dumps({"corpus": str(folder / "corpus"), "dedup": {}, "apply": {}}))
        return found

    monkeypatch.setattr(run_check, looks, look_and_begin)
    run_check.check_output(RunConfig(folder / "corpus", out))


def test_ftfy_without_its_package_is_refused(folder, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    code, message = refused(folder, "--normalize.ftfy", "true", capsys=capsys)
    assert code == 2 and "pip install 'gristmill[ftfy]'" in message
    with pytest.raises(UsageError, match="not installed"):
        check_ftfy()


def test_the_command_itself_exits_with_2(folder) -> None:
    arguments = run_arguments(folder / "corpus", folder / "out", "--mix.weights", "nonexist", "2")
    done = subprocess.run(arguments, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: --mix.weights names 'nonexist'")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_without_the_column_of_texts_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """A damaged one is not: the run leaves it out."""
    corpus = tmp_path / "corpus"
    for name, columns in (("book", ["text"]), ("wiki", ["content", "id"])):
        table = pa.table({column: ["one", "two"] for column in columns})
        (corpus / name).mkdir(parents=True)
        if suffix == "csv":
            pa.csv.write_csv(table, corpus / name / "w.csv")
        else:
            pq.write_table(table, corpus / name / "w.parquet")
    (corpus / "torn").mkdir()
    (corpus / "torn/w.parquet").write_bytes(b"PAR1 torn")
    out = tmp_path / "out"
    command = ["--corpus", str(corpus), "--out", str(out), "--normalize.read_also", "csv"]
    for more in ([], ["--dry_run"]):
        code, message = exit_of([*command, *more], capsys)
        assert code == 2 and f"wiki/w.{suffix} has no column 'text', only content, id" in message
        assert not out.exists()
    check_run(RunConfig(corpus, out, normalize=Normalize(read_also=("csv",))))  # planning reads no document
    shutil.rmtree(corpus / "wiki")
    assert exit_of([*command, "--dry_run"], capsys)[0] == 0


def test_lines_without_the_field_of_texts_are_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not of a first record of another kind: a run may have so many."""
    corpus = tmp_path / "corpus"
    lines = {"chat": ['{"body": "one"}'] * 150, "note": ["{", '{"body": "one"}'], "book": ["{", '{"text": "one"}']}
    for name, its in lines.items():
        (corpus / name).mkdir(parents=True)
        (corpus / name / "a.jsonl").write_text("\n".join(its) + "\n")
    code, message = exit_of(["--corpus", str(corpus), "--out", str(tmp_path / "out"), "--dry_run"], capsys)
    assert code == 0 and message.count("note: no text in the first records of") == 1, message
    assert "first records of chat/a.jsonl, which count as malformed." in message
    assert "chat/a.jsonl line 1: no text, only body: give --text_column NAME" in message
    (tmp_path / "run.toml").write_text(f'corpus = "{corpus}"\nout = "{tmp_path}/out"\n[sources.chat]\n')
    _, message = exit_of([str(tmp_path / "run.toml"), "--dry_run"], capsys)
    assert 'give column = "NAME" in [sources.chat] if the text' in message


def test_dry_run_explains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--explain", "--explain_tasks"):
        code, message = exit_of([*run_arguments(folder / "corpus", folder / "out")[4:], "--dry_run", option], capsys)
        assert code == 0 and "no stage finished yet" in message
    assert not (folder / "out").exists()
