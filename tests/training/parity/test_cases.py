"""The layouts that the parity certificate runs: all of them, or a covering set."""

from dataclasses import replace

import torch

from gristmill_parity.cases import VOCAB_SIZE, all_cases, covering_cases


def test_the_full_set_has_every_layout_and_a_reason_for_each_refused_one() -> None:
    cases, refused = all_cases(8)
    layouts = {replace(c.layout, micro_batches=0) for c in cases}
    assert len(layouts) == len(cases) and not layouts & refused.keys()
    for processes in range(1, 9):
        found = {(x.dp, x.tp, x.pp) for x in layouts if x.dp * x.tp * x.pp == processes}
        possible = {
            (dp, tp, processes // dp // tp)
            for dp in range(1, 9)
            for tp in (1, 2, 3, 4, 6, 8)
            if processes % (dp * tp) == 0
        }
        assert found == possible
    eight = [x for x in layouts if (x.dp, x.tp, x.pp) == (2, 2, 2)]
    # sequence parallel or not; ZeRO x schedules, less split backward with 3, or with any where torch is older
    assert len(eight) == 2 * (4 * 10 - 4 * (1 if torch.__version__ >= "2.13" else 4))
    assert {c.preset for c in cases} == {"llama", "gpt2"} and {c.recompute for c in cases} == {
        "none",
        "selective",
        "full",
    }
    more = [(c.layout.micro_batches > c.layout.stages) - (c.layout.micro_batches < c.layout.stages) for c in cases]
    assert min(more.count(n) for n in (-1, 0, 1)) > 100
    assert any("; try --parallel." in reason or "; expected one of 1, " in reason for reason in refused.values())
    known = ("zero 3", "tp 5", "tp 7", "needs torch")
    assert all(any(words in reason for words in known) for reason in refused.values())
    assert VOCAB_SIZE % 2 and VOCAB_SIZE % 3


def test_the_covering_set_is_small_and_deterministic() -> None:
    first, second = covering_cases(), covering_cases()
    assert first == second and len(first) < 80
    assert {c.layout.schedule for c in first} == {c.layout.schedule for c in all_cases(8)[0]}
    assert {(c.layout.dp, c.layout.tp, c.layout.pp) for c in first} >= {(2, 2, 2), (1, 4, 2)}
