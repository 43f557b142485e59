"""How good a model is: likelihoods of texts and choices, answers of its own, and tasks of lm_eval."""
