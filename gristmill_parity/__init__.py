"""Proofs: training computes what independent references do, and every parallel layout what one process does.

Read in this order:

    parity.py         the command `gristmill parity`
    certificate.py    all cases in warm processes, a table, and a verdict
    cases.py          a case: a small model, a layout, how it trains; every layout, or a set that covers all pairs
    feature_cases.py  cases of precisions, optimizers, documents, grids, contexts, replicas, experts, published models
    runs/             runs of the trainer itself, from token shards, with a stop and a resume
    worker.py         what each rank of a case runs, and keeps: losses, gradients, weights, traffic
    reference.py      the run that a case is compared with, of one of the models of
    reference_models.py  transformers, or plain/, which shares no code with the trainer
    comparison.py     the differences, their limits, and the traffic against its formulas
    explain.py        of a red row the first tensor that is wrong, and what the difference looks like
    recorded_case.py  what each rank of such a row runs, with a recorder on its part of the model
    recorded_training.py  a run of the trainer that records steps, of `gristmill train --record.steps`
    gates/            the command `gristmill check`: two runs compared by what they logged, saved and recorded
    recording/        recordings of any trainer's tensors, and their comparison; needs torch and numpy alone

It imports the trainer, never the other way. docs/concepts/parallelism.md has the limits.
"""
