"""What collectives do, from the inside: records of operations, flows and hosts in rings of shared memory."""
