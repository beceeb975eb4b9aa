"""What proves and shows fedsender: the demo, a simulation of the whole daemon, benchmarks, and the
parts of a homeserver and of receiving servers that they share with the tests."""
