"""MinHash signatures: matching form, shingles, hashes and minima."""
