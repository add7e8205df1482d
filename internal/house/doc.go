// Package house tests the rules of the code that a compiler does not know: which package may import which,
// what a pure package may not do, that no test library is linked into the binary, what CONTRIBUTING.md
// says of files, lines and comments, how many lines a package may have, and whether the documents give times
// as the code has them. It writes test/acceptance.md. It holds tests only. They read the source tree and run
// nothing of it.
//
// There are five layers: 0 pure packages, 1 adapters, 2 actors and the admin API, 3 internal/server and the
// command, 4 tests. A package imports only packages of lower layers. internal/ is below all of them.
package house
