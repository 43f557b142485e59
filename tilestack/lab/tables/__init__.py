"""Results as tables of the documentation.

`generated` rewrites what stands between markers, `by_name` makes the table that a marker names; `summary` and `serving` are
larger ones, `markdown` writes any, and `loss_figure` draws the one picture that is made of results.
"""
