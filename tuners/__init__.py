"""Search spaces, studies, objectives and trial runners."""
