"""What people open in a browser: `page` is any such page with its plots and tables, `write` the report on a machine.

`plots`, `training_run` and `served_request` are sections of it. Others lie with what they show, as that of proofs does.
"""
