"""How a rank measures the numbers of a step and acts on the decision."""
