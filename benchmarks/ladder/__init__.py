"""Forms that a later rung of the ladder replaced for good, kept to be measured.

Each is a component of an engine, equal to the reference's in all that it answers
(`tests/test_ladder_forms.py`). `lockstep.rungs` says where each one stood.
"""
