"""A pretrained model of 135M parameters: a solver with a calculator, and a checker."""
