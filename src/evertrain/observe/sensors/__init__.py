"""What does this node look like now? One module per sensor; what a reading means is said by the rules of `detect`."""
