"""Choosing tokens from a vocabulary without sorting it: survey, bound, gather, decide.

    survey.py   grid (rows, spans)   a program per span of 4096 logits. Of a row without filters: the span's winner. Of
                                     others: the largest of each of 32 groups; for top_p also Σ exp and how many logits
                                     lie how deep (depths.py)
    bound.py    grid (rows)          without filters the best of the spans' winners, and that row is done; of others, from
                                     the survey alone, a value below which no token can survive the row's filters
    gather.py   grid (rows, spans)   tokens at or above it, up to 512 of a span; pieces of a span that have none are not
                                     read
    decide.py   grid (rows)          `sample`: exact thresholds by bisection over the few gathered, then the winner
    largest.py  grid (rows)          `topk`, in the stead of decide: the k largest of the few gathered, in order

candidates.py launches the first three for both operators, and search.py is what their last steps do with the candidates.
argmax.py needs none of that: the best of each span, then the best of those.

A row's settings (settings.py) are looked at first, and a row pays for what it asks: temperature 0 draws no random numbers
(noise.py), and without filters the logits are read once. What is gathered are hundreds or thousands of tokens, not hundreds
of thousands. Logits that defeat the bound (all equal, say), or a k above the number of groups, give more candidates than
there is room for; the last step then reads the row of logits in their stead, again and again: slow, never wrong.
"""
