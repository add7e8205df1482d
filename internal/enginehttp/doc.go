// Package enginehttp is an HTTP/1.1 client for one engine, made for a relay: it writes a request in one
// piece, reads the answer on the caller's goroutine, and gives of a chunked body everything that one read of
// the socket has brought. docs/performance.md has what this saves against http.Transport, whose two
// goroutines per connection hand every request over four times.
//
// It is strict where net/http is lenient, because what two parsers understand differently is a way to
// smuggle: lines end in CRLF, there are no folded fields, Content-Length and chunked exclude each other,
// repeated lengths must agree. A connection is used again only if its answer was read to the end, nothing
// lies behind that end, the request was written whole and never given up, and the peer has sent nothing since
// (a look into the socket before each reuse, where the system has one).
//
// What it does not do: TLS, proxies, redirects, compression, Expect, upgrades, requests whose body is not in
// memory, and sending a request twice: whoever calls decides that, by the facts in a SendError.
package enginehttp
