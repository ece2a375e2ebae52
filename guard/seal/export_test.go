package seal

// Overhead is overhead, for the tests.
const Overhead = overhead
