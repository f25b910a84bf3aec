"""The core checked and drawn: worlds walked exhaustively, charts made from the code."""
