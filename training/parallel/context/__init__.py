"""Context parallelism: the tokens of a sequence divided over ranks, and attention between them by ring or Ulysses."""
