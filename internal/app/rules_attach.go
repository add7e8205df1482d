package app

import (
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

// taken maps a value to the path that has it.
type taken map[string]string

func (d *decoder) claim(by taken, path, what, value string) {
	if value == "" || !d.isGood(path) {
		return
	}
	if first, ok := by[value]; ok {
		d.wrong(path, what+" "+strconv.Quote(value)+" is taken by "+first, "choose another one")
		return
	}
	by[value] = path
}

func (d *decoder) checkRank(family string, r *AttachRank, path string, addresses taken) {
	if r.URL = strings.TrimSuffix(r.URL, "/"); d.isSound(path + ".url") {
		d.checkURL(path+".url", r.URL)
	}
	d.checkSelector(family, r, path)
	if r.KVEvents != nil {
		d.checkSocket(r, path, addresses)
	}
	d.claimAddress(addresses, r, path)
}

// checkURL accepts scheme, host, port and the path that all routes of the engine begin with. Credentials do
// not belong in files.
func (d *decoder) checkURL(path, text string) {
	const wanted = "http://HOST:PORT or https://HOST:PORT, with a path if the engine has one"
	u, err := url.Parse(text)
	f := Fault{Found: strconv.Quote(text), Wanted: wanted}
	switch {
	case err != nil:
		f.Found = "a text that is not a URL" // the parser's message would repeat credentials
	case u.User != nil:
		f.Found, f.Hint = "a URL with credentials", "leave user and password out"
	case IsServiceURL(text):
		f.Hint = "write it in engine.services: its addresses are ranks"
	case u.Scheme != "http" && u.Scheme != "https":
		if !strings.Contains(text, "://") {
			f.Hint = "write http:// in front"
		}
	case u.Hostname() == "":
	case u.Port() != "" && !isPort(u.Port()), strings.HasSuffix(u.Host, ":"):
		f.Hint = "ports go from 1 to 65535"
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.Contains(text, "#"):
		f.Hint = "leave everything from ? or # on out"
	case u.Path == "/v1" || strings.HasSuffix(u.Path, "/v1"):
		f.Hint = "leave /v1 out: dpserve adds it"
	case u.Path != "" && (u.RawPath != "" || !formats["path"].fits(u.Path)):
		f.Hint = "the path has letters, digits and . _ ~ - between its slashes"
	default:
		return
	}
	d.broken(path, f)
}

func isPort(text string) bool {
	n, err := strconv.ParseUint(text, 10, 16)
	return err == nil && n > 0
}

func (d *decoder) checkSelector(family string, r *AttachRank, path string) {
	if !d.isGood(path+".addressing", path+".selector") {
		return
	}
	written := d.has(path + ".selector")
	switch {
	case r.Addressing == AddressURL && written:
		d.wrong(path+".selector", "selector is sent only with addressing: header or body",
			"write addressing: header, or leave selector out")
	case r.Addressing != AddressURL && !written:
		d.wrong(path+".selector", "the key selector is missing",
			"it is the rank number that is sent to the engine, from 0")
	case r.Addressing != AddressURL && family == FamilyOpenAI:
		d.unlike(path+".addressing", r.Addressing, AddressURL,
			"family openai has no way to name a rank: give every rank an own url")
	case r.Addressing == AddressBody && family == FamilyVLLM:
		d.unlike(path+".addressing", r.Addressing, AddressHeader+" | "+AddressURL,
			"vllm reads the rank from the header only")
	}
}

// claimAddress refuses two ranks with the same engine: its load would be counted twice, and epochs would mix.
func (d *decoder) claimAddress(by taken, r *AttachRank, path string) {
	if r.URL == "" || !d.isGood(path+".url", path+".addressing", path+".selector") {
		return
	}
	whole := r.URL
	some := whole + " by selector"
	one, other := whole, some // other is in by if a rank addresses the URL in the other way
	if r.Addressing != AddressURL {
		one, other = whole+" selector "+strconv.Itoa(r.Selector), whole
	}
	if first, ok := by[other]; ok {
		d.wrong(path+".addressing", "the url is addressed as a whole and by selector ("+first+")",
			"write addressing and selector on each of its ranks")
		return
	}
	if r.Addressing != AddressURL {
		by[some] = path + ".url"
	}
	d.claim(by, path+".url", "engine", one)
}

// checkSocket runs the rules of a rank's event sockets. The publisher there reports what the rank has cached,
// so it must be the rank's own engine: on the host of its url, and shared with no other rank.
func (d *decoder) checkSocket(r *AttachRank, rank string, addresses taken) {
	s, path := r.KVEvents, rank+".kv_events"
	if !d.isGood(path) {
		return
	}
	if (s.Connect == "") == (s.Bind == "") {
		d.wrong(path, "exactly one of connect and bind says where KV events are found",
			"connect when the engine binds its socket (vllm, sglang), bind when it dials")
		return
	}
	engine := ""
	if u, err := url.Parse(r.URL); err == nil && d.isGood(rank+".url") {
		engine = u.Hostname()
	}
	d.checkDialled(s.Connect, path+".connect", engine)
	d.checkDialled(s.Replay, path+".replay", engine)
	d.checkBound(s.Bind, path+".bind")
	d.claim(addresses, path+".connect", "event socket", s.Connect)
	d.claim(addresses, path+".bind", "event socket", s.Bind)
	d.claim(addresses, path+".replay", "event socket", s.Replay)
}

// checkDialled checks a socket of the engine. engine is the engine's host, "" if its url has a fault.
func (d *decoder) checkDialled(text, path, engine string) {
	host, ok := d.socketHost(text, path)
	if !ok {
		return
	}
	switch {
	case isUnspecified(host):
		d.unlike(path, strconv.Quote(text), "tcp://HOST:PORT", "name the engine's host")
	case engine != "" && !isLoopback(host) && !strings.EqualFold(host, engine):
		d.wrong(path, "the engine is at "+engine+", its event socket at "+host,
			"name the host that the rank's url names")
	}
}

func (d *decoder) checkBound(text, path string) {
	if host, ok := d.socketHost(text, path); ok && host != "*" && isUnspecified(host) {
		d.wrong(path, "the socket would listen on every interface",
			"write tcp://127.0.0.1:PORT, or tcp://*:PORT for the node's own address")
	}
}

// socketHost returns the host of a written socket; ok is false if it is not written or not valid.
func (d *decoder) socketHost(text, path string) (host string, ok bool) {
	if !d.isSound(path) {
		return "", false
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "tcp" || u.Hostname() == "" || !isPort(u.Port()) ||
		u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
		d.unlike(path, strconv.Quote(text), "tcp://HOST:PORT", "")
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
