"""Lock-free training of a bag of words by several processes (Hogwild, Recht et al. 2011)."""
