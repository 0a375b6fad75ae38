"""Plain code from the papers, which shares none with the trainer: the independent references of the certificate."""
