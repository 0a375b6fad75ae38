"""Rules of quality: words and lines of a document, the measures that rules compare, and the recipes that name them."""
