"""The whole of rollgrid on one machine: embedded servers and the five services, supervised as processes.

Everything runs as a subprocess; no service is imported here.
"""
