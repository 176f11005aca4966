"""What this machine is: measured or asked of the kernel, not read off a data sheet.

Banks and engines ask it before they allocate; the planner never does.
"""
