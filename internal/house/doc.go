// Package house keeps the house rules that a compiler does not know: which room may import which, what a pure room may not
// touch, and that test libraries stay out of the binary. It holds tests only; they read the source tree and run nothing.
//
// The floors are those of the design: 0 pure cores, 1 adapters, 2 actors and the admin API, 3 wiring and the command. A room
// imports only rooms on floors below its own. internal/ lies below all of them, test/ above.
package house
