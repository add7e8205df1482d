package app

import (
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

// checkSocket runs the rules of a rank's event sockets. Who publishes there says what the rank has cached, so it must be the
// rank's own engine: on the host of its url, and of no other rank.
func (d *decoder) checkSocket(r *AttachRank, rank string, addresses taken) {
	s, path := r.KVEvents, rank+".kv_events"
	if !d.good(path) {
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
	if u, err := url.Parse(r.URL); err == nil && d.good(rank+".url") {
		engine = u.Hostname()
	}
	d.checkDialled(s.Connect, path+".connect", engine)
	d.checkDialled(s.Replay, path+".replay", engine)
	d.checkBound(s.Bind, path+".bind")
	for key, text := range map[string]string{"connect": s.Connect, "bind": s.Bind, "replay": s.Replay} {
		d.claim(addresses, join(path, key), "event socket", text)
	}
}

// checkDialled is for a socket of the engine. engine is its host, "" if its url is at fault.
func (d *decoder) checkDialled(text, path, engine string) {
	host, ok := d.socketHost(text, path)
	if !ok {
		return
	}
	switch {
	case unspecified(host):
		d.broken(path, Fault{Found: strconv.Quote(text), Wanted: "tcp://HOST:PORT", Hint: "name the engine's host"})
	case engine != "" && !loopback(host) && !strings.EqualFold(host, engine):
		d.broken(path, Fault{
			Message: "the engine is at " + engine + ", its event socket at " + host, Hint: "name the host that the rank's url names",
		})
	}
}

// checkBound is for a socket of ours.
func (d *decoder) checkBound(text, path string) {
	if host, ok := d.socketHost(text, path); ok && host != "*" && unspecified(host) {
		d.broken(path, Fault{
			Message: "the socket would listen on every interface",
			Hint:    "write tcp://127.0.0.1:PORT, or tcp://*:PORT for the node's own address",
		})
	}
}

// socketHost is the host of a socket that was written; ok is false if there is none, or nothing that could be one.
func (d *decoder) socketHost(text, path string) (host string, ok bool) {
	if !d.has(path) || !d.good(path) {
		return "", false
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "tcp" || u.Hostname() == "" || !validPort(u.Port()) ||
		u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
		d.broken(path, Fault{Found: strconv.Quote(text), Wanted: "tcp://HOST:PORT"})
		return "", false
	}
	return u.Hostname(), true
}

// unspecified says that host stands for every address of a machine.
func unspecified(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "*" || err == nil && a.Unmap().IsUnspecified()
}

func loopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.Unmap().IsLoopback()
}
