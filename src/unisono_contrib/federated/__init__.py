"""Federated training: clients keep their data, and send what they have learnt in rounds of local steps."""
