package client

import (
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

// defaultPort is the port of HOST. A URL without a port has that of its scheme, which a proxy may use.
const defaultPort = "8265"

// addressHint says which addresses there are.
const addressHint = "an address is HOST, HOST:PORT, :PORT or http://HOST:PORT; the port of HOST is " +
	defaultPort

// baseURL returns scheme://host:port of an address. A missing scheme is http. A missing host, and the
// addresses that stand for all interfaces, mean this machine.
func baseURL(addr string) (string, error) {
	bad := func(why string) (string, error) {
		return "", newError(CodeInvalidArgument, addressHint, "%q is not the address of a dpserve: %s", addr,
			why)
	}
	scheme, host, isURL := strings.Cut(addr, "://")
	if !isURL {
		scheme, host = "http", addr
	}
	if scheme = strings.ToLower(scheme); scheme != "http" && scheme != "https" {
		return bad("its scheme is " + strconv.Quote(scheme))
	}
	host, port := strings.TrimSuffix(host, "/"), ""
	if isURL {
		host = strings.Replace(host, "%25", "%", 1) // the zone of an IPv6 address
	}
	switch {
	case host == "" && addr != "":
		return bad("it has no host")
	case strings.ContainsAny(host, "/?#@ \t\r\n"):
		return bad("it has more than a host and a port")
	}
	bare := host
	if n := len(host); n > 1 && host[0] == '[' && host[n-1] == ']' {
		bare = host[1 : n-1]
	}
	if ip, err := netip.ParseAddr(bare); err == nil {
		host = ip.String() // also IPv6 without a port
	} else if h, p, err := net.SplitHostPort(host); err == nil {
		if n, err := strconv.ParseUint(p, 10, 16); err != nil || n == 0 {
			return bad("its port is " + strconv.Quote(p))
		}
		host, port = h, p
	} else if strings.ContainsAny(host, ":[]") {
		return bad("write an IPv6 address with a port as [::1]:" + defaultPort)
	}
	if _, err := strconv.Atoi(host); err == nil {
		return bad("it is a number; a port alone is written :" + host)
	}
	if !isHost(host) {
		return bad("its host is " + strconv.Quote(host))
	}
	host = thisMachine(host)
	switch {
	case port != "":
		host = net.JoinHostPort(host, port)
	case !isURL:
		host = net.JoinHostPort(host, defaultPort)
	case strings.Contains(host, ":"):
		host = "[" + host + "]"
	}
	return (&url.URL{Scheme: scheme, Host: host}).String(), nil
}

// isHost reports whether a text can be a host: an IP address, a name, or "".
func isHost(s string) bool {
	if ip, err := netip.ParseAddr(s); err == nil {
		s = ip.Zone()
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._") == ""
}

// thisMachine replaces a host that stands for every interface by loopback. A node refuses such a Host header.
func thisMachine(host string) string {
	ip, err := netip.ParseAddr(host)
	switch {
	case host == "" || err == nil && ip.Is4() && ip.IsUnspecified():
		return "127.0.0.1"
	case err == nil && ip.IsUnspecified():
		return "::1"
	}
	return host
}
