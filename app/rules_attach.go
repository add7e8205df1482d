package app

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// checkAttach runs the rules of kind attach. dpserve starts no engine then, so every key about starting is a
// fault, and every engine needs an exact address.
func (d *decoder) checkAttach(a *draft) {
	path := a.path + ".engine"
	for _, key := range []string{"command", "args", "env"} {
		if at := join(path, key); d.has(at) {
			d.broken(at, Fault{Message: key + " is for engines that dpserve starts, not for kind attach",
				Hint: "leave it out"})
		}
	}
	if !d.need(path, "ranks", "write ranks: [{url: \"http://127.0.0.1:8100\"}]") {
		return
	}
	if len(a.Engine.Ranks) == 0 {
		d.broken(path+".ranks", Fault{Found: "an empty list", Wanted: "at least one rank",
			Hint: "write {url: \"http://127.0.0.1:8100\"}"})
	}
	addresses := taken{}
	for i := range a.Engine.Ranks {
		d.checkRank(a.Engine.Family, &a.Engine.Ranks[i], index(path+".ranks", i), addresses)
	}
}

func (d *decoder) checkRank(family string, r *AttachRank, path string, addresses taken) {
	if d.need(path, "url", "write url: \"http://HOST:PORT\"") {
		r.URL = strings.TrimSuffix(r.URL, "/")
		d.checkURL(path+".url", r.URL)
	}
	d.checkSelector(family, r, path)
	if d.has(path+".node") && d.isGood(path+".node") && !labelName.MatchString(r.Node) {
		d.broken(path+".node", Fault{Found: strconv.Quote(r.Node), Wanted: "the id of a dpserve node"})
	}
	if r.KVEvents != nil {
		d.checkSocket(r, path, addresses)
	}
	d.claimAddress(addresses, r, path)
}

// checkURL accepts only scheme, host and port: clients choose the routes, and credentials do not belong in
// files.
func (d *decoder) checkURL(path, text string) {
	const wanted = "http://HOST:PORT or https://HOST:PORT"
	u, err := url.Parse(text)
	f := Fault{Found: strconv.Quote(text), Wanted: wanted}
	switch {
	case err != nil:
		f.Found = "a text that is not a URL" // the parser's message would repeat credentials
	case u.User != nil:
		f.Found, f.Hint = "a URL with credentials", "leave user and password out"
	case u.Scheme != "http" && u.Scheme != "https":
		f.Hint = schemeHint(text)
	case u.Hostname() == "":
	case u.Port() != "" && !isPort(u.Port()), strings.HasSuffix(u.Host, ":"):
		f.Hint = "ports go from 1 to 65535"
	case u.Path != "" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.Contains(text, "#"):
		f.Hint = "leave everything behind the port out, also /v1"
	default:
		return
	}
	d.broken(path, f)
}

func schemeHint(text string) string {
	if strings.Contains(text, "://") {
		return ""
	}
	return "write http:// in front"
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
		d.broken(path+".selector", Fault{
			Message: "selector is sent only with addressing: header or body",
			Hint:    "write addressing: header, or leave selector out",
		})
	case r.Addressing != AddressURL && !written:
		d.broken(path+".selector", Fault{
			Message: "the key selector is missing",
			Hint:    "it is the rank number that is sent to the engine, from 0",
		})
	case r.Addressing != AddressURL && family == FamilyOpenAI:
		d.broken(path+".addressing", Fault{
			Found: r.Addressing, Wanted: AddressURL,
			Hint: "family openai has no way to name a rank: give every rank an own url",
		})
	case r.Addressing == AddressBody && family == FamilyVLLM:
		d.broken(path+".addressing", Fault{
			Found: r.Addressing, Wanted: AddressHeader + " | " + AddressURL,
			Hint: "vllm reads the rank from the header only",
		})
	}
}

// claimAddress refuses two ranks with the same engine: its load would be counted twice, and epochs would mix.
func (d *decoder) claimAddress(by taken, r *AttachRank, path string) {
	if r.URL == "" || !d.isGood(path+".url", path+".addressing", path+".selector") {
		return
	}
	whole, one := r.URL, r.URL+" selector "+strconv.Itoa(r.Selector)
	const some = " by selector"
	if r.Addressing == AddressURL {
		if first, ok := by[whole+some]; ok {
			d.mixed(path, first)
			return
		}
		d.claim(by, path+".url", "engine", whole)
		return
	}
	if first, ok := by[whole]; ok {
		d.mixed(path, first)
		return
	}
	by[whole+some] = path + ".url"
	d.claim(by, path+".url", "engine", one)
}

func (d *decoder) mixed(path, first string) {
	d.broken(path+".addressing", Fault{
		Message: fmt.Sprintf("the url is addressed as a whole and by selector (%s)", first),
		Hint:    "write addressing and selector on each of its ranks",
	})
}
