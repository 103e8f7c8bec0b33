"""The colocated loop: one process in which a rollout engine and a training actor take turns."""
