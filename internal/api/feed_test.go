package api_test

import (
	"bufio"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
)

// pageToken is the admin token in these tests.
const pageToken = "dpa1.0123456789abcdef"

// askPage sends a GET with the token and header fields in pairs.
func askPage(t *testing.T, s *api.Server, path string, header ...string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.Addr().String()+path, nil)
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer "+pageToken)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	own := &http.Transport{DisableKeepAlives: true}
	answer, err := own.RoundTrip(r)
	require.NoError(t, err)
	t.Cleanup(func() { _ = answer.Body.Close() })
	return answer
}

// CC30: The page comes without a token and with a policy under which only its own files run; a query, so a
// token in a link, is refused.
func TestPageFiles(t *testing.T) {
	s, _ := serve(t, api.Config{Backend: newBackend(), Token: pageToken})
	for file, kind := range map[string]string{
		"/": "text/html", "/page/page.css": "text/css", "/page/page.js": "text/javascript",
		"/page/icon.svg": "image/svg+xml",
	} {
		// a link on another page, followed
		answer := askPage(t, s, file, "Authorization", "", "Sec-Fetch-Site", "cross-site")
		assert.Equal(t, http.StatusOK, answer.StatusCode, file)
		assert.Contains(t, answer.Header.Get("Content-Type"), kind)
		assert.Equal(t, "nosniff", answer.Header.Get("X-Content-Type-Options"))
		policy := answer.Header.Get("Content-Security-Policy")
		assert.Contains(t, policy, "script-src 'self'; style-src 'self'")
		assert.Contains(t, policy, "frame-ancestors 'none'")
		assert.NotContains(t, policy, "unsafe")
	}
	for path, status := range map[string]int{
		"/?token=" + pageToken: 400, "/page/page.js?v=1": 400, "/page/nope.js": 404,
		"/page/..%2fpage.go": 404, "/page/": 404, "/api/v1/feed?token=" + pageToken: 401,
	} {
		assert.Equal(t, status, askPage(t, s, path, "Authorization", "").StatusCode, path)
	}
}

// TestPageHasNoMarkupOfOthers: the page's scripts have no way to turn text into markup or into code, its HTML
// has neither scripts nor styles inside, what it names exists, and all of it is small.
func TestPageHasNoMarkupOfOthers(t *testing.T) {
	files, err := filepath.Glob("page/*")
	require.NoError(t, err)
	sizes, names := 0, map[string]bool{}
	for _, file := range files {
		names[path.Base(file)] = true
	}
	forbidden := regexp.MustCompile(`(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|` +
		`new Function|DOMParser|srcdoc|localStorage|document\.cookie|<script>|<style|\sstyle=|\son[a-z]+="`)
	named := regexp.MustCompile(`"(?:/page/|\./)([^"]+)"`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		sizes += len(text)
		assert.Empty(t, forbidden.FindAllString(string(text), -1), file)
		for _, name := range named.FindAllStringSubmatch(string(text), -1) {
			assert.True(t, names[name[1]], "%s names %s", file, name[1])
		}
	}
	assert.Less(t, sizes, 200_000)
}

// parseScripts is a program of Node.js that parses the modules in a folder.
const parseScripts = `const fs = require("fs"), vm = require("vm"), folder = process.argv[1];
for (const f of fs.readdirSync(folder).filter(f => f.endsWith(".js"))) {
	new vm.SourceTextModule(fs.readFileSync(folder + "/" + f, "utf8"), { identifier: f });
}`

// TestPageScriptsParse: the scripts have no fault of syntax. The browser runs them in make test-page.
func TestPageScriptsParse(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("there is no Node.js here")
	}
	out, err := exec.CommandContext(t.Context(), node, "--no-warnings", "--experimental-vm-modules", "-e",
		parseScripts, "page").CombinedOutput()
	require.NoError(t, err, string(out))
}

// feedReader reads the snapshots of an open feed.
type feedReader struct {
	t     *testing.T
	lines *bufio.Reader
}

func openFeed(t *testing.T, s *api.Server) feedReader {
	t.Helper()
	answer := askPage(t, s, "/api/v1/feed", "Sec-Fetch-Site", "same-origin")
	require.Equal(t, http.StatusOK, answer.StatusCode)
	assert.Equal(t, "text/event-stream", answer.Header.Get("Content-Type"))
	return feedReader{t, bufio.NewReader(answer.Body)}
}

// fed is what these tests read of a snapshot.
type fed struct {
	At   string
	Apps struct {
		Apps  []client.AppStatus
		Error *client.Error
	}
	Events  struct{ Events []client.Event }
	Nodes   struct{ Error *client.Error }
	Routers map[string]client.Info
}

func (f feedReader) next() (s fed) {
	f.t.Helper()
	line, err := f.lines.ReadString('\n')
	require.NoError(f.t, err)
	data, ok := strings.CutPrefix(line, "data: ")
	require.True(f.t, ok, line)
	require.NoError(f.t, json.Unmarshal([]byte(data), &s))
	line, err = f.lines.ReadString('\n')
	require.NoError(f.t, err)
	require.Equal(f.t, "\n", line)
	return s
}

// CC31: Open pages share a snapshot of what the admin API answers, errors too, and get the next one when
// something changes; their streams end with the node.
func TestFeed(t *testing.T) {
	b := newBackend()
	b.apps["<b>"] = client.AppStatus{Name: "<b>", Status: "RUNNING", Revision: 3}
	s, _ := serve(t, api.Config{Backend: b, Routers: &fakeRouters{}, Token: pageToken})
	first, second := openFeed(t, s), openFeed(t, s)
	one := first.next()
	require.Len(t, one.Apps.Apps, 1)
	assert.Equal(t, "<b>", one.Apps.Apps[0].Name)
	assert.Equal(t, "kv", one.Routers["<b>"].Policy)
	assert.Contains(t, one.Nodes.Error.Message, "does not serve GET /api/v1/nodes", "this node has no list")
	for a, b := map[string]bool{one.At: true}, map[string]bool{}; !haveCommon(a, b); {
		b[second.next().At] = true
		if !haveCommon(a, b) {
			a[first.next().At] = true
		}
	}

	b.happen(client.Event{App: "demo", Kind: "unit", Phase: "backoff"})
	for snap := first.next(); len(snap.Events.Events) == 0; snap = first.next() {
		require.Len(t, snap.Apps.Apps, 1)
	}
	b.mu.Lock()
	b.fail = io.ErrUnexpectedEOF
	b.mu.Unlock()
	b.happen(client.Event{App: "demo", Kind: "unit", Phase: "ready"})
	for snap := first.next(); snap.Apps.Error == nil; snap = first.next() {
		require.Len(t, snap.Apps.Apps, 1)
	}
	require.NoError(t, s.Close())
	_, err := io.Copy(io.Discard, first.lines)
	require.NoError(t, err, "the stream ends whole")
}

// An answer of the leader that breaks off is an error in the snapshot, and no end of the page's stream.
func TestFeedOfALeaderThatBreaksOff(t *testing.T) {
	leader := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, `{"apps":`)
	}))
	defer leader.Close()
	at, err := url.Parse(leader.URL)
	require.NoError(t, err)
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(at) }, ErrorLog: log.New(io.Discard, "", 0),
	}
	s, _ := serve(t, api.Config{
		Backend: newBackend(), Token: pageToken,
		Forward: func() (http.Handler, bool) { return proxy, true },
	})
	first := openFeed(t, s).next()
	require.NotNil(t, first.Apps.Error)
	assert.Contains(t, first.Apps.Error.Message, "is cut")
}

func haveCommon(a, b map[string]bool) bool {
	for at := range a {
		if b[at] {
			return true
		}
	}
	return false
}

// The feed is for pages of this port that show the token, and for a bounded number of them.
func TestFeedRefuses(t *testing.T) {
	s, _ := serve(t, api.Config{Backend: newBackend(), Token: pageToken})
	for _, header := range [][]string{
		{"Origin", "http://evil.example"},
		{"Origin", "null"},
		{"Sec-Fetch-Site", "cross-site"},
		{"Sec-Fetch-Site", "same-site"},
	} {
		assert.Equal(t, http.StatusForbidden, askPage(t, s, "/api/v1/feed", header...).StatusCode, header)
	}
	assert.Equal(t, http.StatusUnauthorized, askPage(t, s, "/api/v1/feed", "Authorization", "").StatusCode)
	for range 64 {
		openFeed(t, s)
	}
	answer := askPage(t, s, "/api/v1/feed")
	assert.Equal(t, http.StatusServiceUnavailable, answer.StatusCode)
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	assert.Contains(t, string(text), "64 pages are open already")
}
