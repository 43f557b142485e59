"""A picture of what a kernel reads and writes: `tilestack tiles`.

regions.py   from addresses to elements of the tensors that a kernel was given
sectors.py   a model of warps: how many 32-byte sectors an access touches
steps.py     what a recording holds
record.py    runs a call in Triton's interpreter, and notes every load and store
cases.py     the call to look at: the named case, or the smallest that tells something
counts.py    a row of sums for every kernel and tensor, and a table of them
page.py      one self-contained page, from page.html: source, tensors, programs, steps
"""
