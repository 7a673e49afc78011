package health

// LongestRecord is for tests that go beyond it.
const LongestRecord = longestRecord
