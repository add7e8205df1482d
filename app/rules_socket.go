package app

import (
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

// checkSocket runs the rules of a rank's event sockets. The publisher there reports what the rank has cached,
// so it must be the rank's own engine: on the host of its url, and shared with no other rank.
func (d *decoder) checkSocket(r *AttachRank, rank string, addresses taken) {
	s, path := r.KVEvents, rank+".kv_events"
	if !d.isGood(path) {
		return
	}
	if (s.Connect == "") == (s.Bind == "") {
		d.broken(path, Fault{
			Message: "exactly one of connect and bind says where KV events are found",
			Hint:    "connect when the engine binds its socket (vllm, sglang), bind when it dials",
		})
		return
	}
	engine := ""
	if u, err := url.Parse(r.URL); err == nil && d.isGood(rank+".url") {
		engine = u.Hostname()
	}
	d.checkDialled(s.Connect, path+".connect", engine)
	d.checkDialled(s.Replay, path+".replay", engine)
	d.checkBound(s.Bind, path+".bind")
	for key, text := range map[string]string{"connect": s.Connect, "bind": s.Bind, "replay": s.Replay} {
		d.claim(addresses, join(path, key), "event socket", text)
	}
}

// checkDialled checks a socket of the engine. engine is the engine's host, "" if its url has a fault.
func (d *decoder) checkDialled(text, path, engine string) {
	host, ok := d.socketHost(text, path)
	if !ok {
		return
	}
	switch {
	case isUnspecified(host):
		d.broken(path, Fault{Found: strconv.Quote(text), Wanted: "tcp://HOST:PORT",
			Hint: "name the engine's host"})
	case engine != "" && !isLoopback(host) && !strings.EqualFold(host, engine):
		d.broken(path, Fault{
			Message: "the engine is at " + engine + ", its event socket at " + host,
			Hint:    "name the host that the rank's url names",
		})
	}
}

// checkBound checks a socket that dpserve binds.
func (d *decoder) checkBound(text, path string) {
	if host, ok := d.socketHost(text, path); ok && host != "*" && isUnspecified(host) {
		d.broken(path, Fault{
			Message: "the socket would listen on every interface",
			Hint:    "write tcp://127.0.0.1:PORT, or tcp://*:PORT for the node's own address",
		})
	}
}

// socketHost returns the host of a written socket; ok is false if it is not written or not valid.
func (d *decoder) socketHost(text, path string) (host string, ok bool) {
	if !d.has(path) || !d.isGood(path) {
		return "", false
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "tcp" || u.Hostname() == "" || !isPort(u.Port()) ||
		u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
		d.broken(path, Fault{Found: strconv.Quote(text), Wanted: "tcp://HOST:PORT"})
		return "", false
	}
	return u.Hostname(), true
}

// isUnspecified reports whether host means every address of a machine.
func isUnspecified(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "*" || err == nil && a.Unmap().IsUnspecified()
}

func isLoopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.Unmap().IsLoopback()
}
