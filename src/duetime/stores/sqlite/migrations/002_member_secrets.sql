-- What the other instances sign with when they speak to a member.
ALTER TABLE members ADD COLUMN secret TEXT NOT NULL DEFAULT '';
