"""Where the roles of a job run: here, in the process of the command; `ray_*` on a Ray cluster."""
