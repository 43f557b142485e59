"""Exercises in GPU programming whose solutions are backends: `tilestack learn`.

exercises/    one file each: the problem, the code with its holes, the solution, hints and known mistakes
exercise.py   reads such a file: what a learner is given, and the solution
folder.py     a learner's folder: attempts, and what has passed
check.py      proves an attempt in a process of its own, which may crash or never end
grading.py    what runs in that process
tutor.py      explains the first claim that is wrong
"""
