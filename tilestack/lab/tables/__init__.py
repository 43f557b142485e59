"""Results as tables of the documentation.

`generated` rewrites what stands between markers, and `by_name` makes the table that a marker names: of contests in
`benchmark`, of other results in `runs`, `serving` and `correctness`, of all at once in `summary`. `markdown` writes any, and
`loss_figure` draws the one picture that is made of results.
"""
