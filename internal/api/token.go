package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// requireToken answers 401 to requests that do not show the token. Probes and scrapers need none. Comparing
// digests takes the same time for every token that a caller may show. Without a token next answers all.
func requireToken(next http.Handler, token, file string) http.Handler {
	if token == "" {
		return next
	}
	want := sha256.Sum256([]byte(token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, shown, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		got := sha256.Sum256([]byte(strings.TrimSpace(shown)))
		switch {
		case isOpenPath(r), strings.EqualFold(scheme, "Bearer") &&
			subtle.ConstantTimeCompare(got[:], want[:]) == 1:
			next.ServeHTTP(w, r)
		default:
			w.Header().Set("WWW-Authenticate", "Bearer")
			WriteError(w, errNoToken(shown != "", file))
		}
	})
}

// isOpenPath reports whether a request needs no token.
func isOpenPath(r *http.Request) bool {
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) &&
		(r.URL.Path == pathHealthz || r.URL.Path == pathMetrics || r.URL.Path == pathEngineMetrics ||
			isPagePath(r.URL.Path))
}

// errNoToken says where the token is. The path of its file is no secret; only its owner may read it.
func errNoToken(isWrong bool, file string) error {
	what := "this port starts programs, and wants the admin token"
	if isWrong {
		what = "the admin token is not that of this node"
	}
	if file == "" {
		file = "the file of its --admin-token-file"
	}
	return problem.New(problem.Unauthenticated, "%s", what).
		WithHint("it is in %s on the node: run the command as the user who owns that file, name a copy with "+
			"--admin-token-file, or set DPSERVE_ADMIN_TOKEN (curl: -H \"Authorization: Bearer TOKEN\")", file)
}
