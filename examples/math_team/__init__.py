"""The math team: a solver that may call a calculator, and a verifier that approves or sends back."""
