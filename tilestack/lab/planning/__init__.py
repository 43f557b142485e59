"""Layouts on several GPUs before any is paid for: `plan` lists them, `plan_costs` prices each, `comm` measures the links."""
