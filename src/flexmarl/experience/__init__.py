"""Per-agent tables of turns. In: prompts, responses, rewards, advantages, as they happen. Out: samples to train on."""
