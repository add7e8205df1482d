package enginehttp

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// appendRequest writes the head of a request. The fields that frame a message or belong to the connection are
// this package's alone: they are left out of header, however they are spelt.
func appendRequest(b []byte, method, target, host string, header http.Header, length int) ([]byte, error) {
	if !validTarget(target) {
		return b, fmt.Errorf("request target %q must begin with / and hold no blanks or control characters",
			target)
	}
	b = append(append(append(b, method...), ' '), target...)
	b = append(append(append(b, " HTTP/1.1\r\nHost: "...), host...), '\r', '\n')
	for name, values := range header {
		if framing(name) {
			continue
		}
		if !httpguts.ValidHeaderFieldName(name) {
			return b, fmt.Errorf("invalid header field name %q", name)
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return b, fmt.Errorf("invalid value of header field %s", name)
			}
			b = append(append(append(append(b, name...), ':', ' '), v...), '\r', '\n')
		}
	}
	if length > 0 || method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch {
		b = strconv.AppendInt(append(b, "Content-Length: "...), int64(length), 10)
		b = append(b, '\r', '\n')
	}
	return append(b, '\r', '\n'), nil
}

func validTarget(s string) bool {
	if s == "" || s[0] != '/' {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] == 0x7f {
			return false
		}
	}
	return true
}

// framing says that a field is not the caller's to send.
func framing(name string) bool {
	switch len(name) {
	case len("Host"):
		return strings.EqualFold(name, "Host")
	case len("Expect"):
		return strings.EqualFold(name, "Expect")
	case len("Trailer"): // and Upgrade
		return strings.EqualFold(name, "Trailer") || strings.EqualFold(name, "Upgrade")
	case len("Connection"):
		return strings.EqualFold(name, "Connection")
	case len("Content-Length"):
		return strings.EqualFold(name, "Content-Length")
	case len("Transfer-Encoding"):
		return strings.EqualFold(name, "Transfer-Encoding")
	}
	return false
}
