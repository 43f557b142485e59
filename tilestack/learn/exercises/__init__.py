"""One file per exercise; `tilestack/learn/exercise.py` says how they are read."""
