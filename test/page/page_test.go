// Package page runs the page of the admin port in a real browser.
package page

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

func TestMain(m *testing.M) {
	if os.Getenv("DPSERVE_PAGE") == "" {
		fmt.Println("skipped: make test-page runs the page in a browser")
		return
	}
	code := m.Run()
	harness.RemoveBinary()
	os.Exit(code)
}

// document is an application whose engines take a while to start, so that a person can see it.
const document = `applications:
- name: demo
  model: {id: demo}
  engine: {kind: sim, args: {sim_startup_s: 2, seed: %d}}
  routing: {policy: lmetric-1}
  data_parallel: {dp_size: 4, coupling: independent}
  rollout: {min_ready_s: 0}
`

// rowOf is an expression of the row of a rank.
const rowOf = `[...document.querySelectorAll("#ranks-table tbody tr")]
	.find(r => r.cells[0].textContent === %s)`

// cellOf is an expression of the text of a rank's cell under a title.
const cellOf = `((` + rowOf + `)?.cells[[...document.querySelectorAll("#ranks-table thead th")]
	.findIndex(h => h.textContent === %s)]?.textContent ?? "")`

// ofNode opens the page of a node.
func (b *browser) ofNode(r *harness.Real) {
	b.t.Helper()
	ask := &http.Request{URL: &url.URL{Host: r.Admin}, Header: http.Header{}}
	harness.ShowToken(ask)
	b.open("http://"+r.Admin+"/", strings.TrimPrefix(ask.Header.Get("Authorization"), "Bearer "))
}

// CC32: A rank that is killed turns red, with its state in words, and comes back with the cause of its end. A
// changed application rolls rank by rank. A node that is killed leaves what was known, and comes back.
func TestTheRanksLive(t *testing.T) {
	b, r := newBrowser(t), harness.Start(t, "--slots", "8")
	r.Expect(harness.EngineFails)
	r.Deploy(fmt.Sprintf(document, 1))
	r.WaitStatus("demo", "RUNNING")
	b.ofNode(r)
	b.until(cellOf+` === "ready"`, "0/2", "State")

	st, known := r.Rank("demo", 0, 2)
	require.True(t, known)
	require.NoError(t, syscall.Kill(st.PID, syscall.SIGKILL))
	b.until(cellOf+` !== "ready"`, "0/2", "State")
	b.until(`(`+rowOf+`).className === "is-bad"`, "0/2")
	b.until(cellOf+` === "starting"`, "0/2", "State")
	b.until(cellOf+` === "ready"`, "0/2", "State")
	assert.Equal(t, "1", eval[string](b, cellOf, "0/2", "Restarts"))
	assert.Contains(t, eval[string](b, cellOf, "0/2", "Why"), "signal killed")
	assert.Contains(t, eval[string](b, `document.querySelector("#events-table").textContent`), "backoff")

	r.Deploy(fmt.Sprintf(document, 2))
	b.until(`document.querySelector("#apps-table").textContent.includes("2 rolling out")`)
	for rank, epoch := range []string{"2", "2", "3", "2"} {
		b.until(cellOf+` === %s`, fmt.Sprint("0/", rank), "Epoch", epoch)
	}
	b.until(`!document.querySelector("#apps-table").textContent.includes("rolling out")`)

	eval[any](b, `document.querySelector("#prompt").value = "Hello <b>world</b>"`)
	eval[any](b, `document.querySelector("#explain-form button").click()`)
	b.until(`document.querySelectorAll("#terms-table tr.picked").length === 1`)

	r.Signal(syscall.SIGKILL)
	b.until(`document.querySelector("#live").textContent.startsWith("no answer")`)
	assert.Equal(t, "ready", eval[string](b, cellOf, "0/2", "State"), "what was known last stays")
	r.Again()
	b.until(`document.querySelector("#live").textContent === "live"`)
}

// The token is in this tab's sessionStorage alone, and a wrong one is refused in words.
func TestTheTokenStaysInTheTab(t *testing.T) {
	b, f := newBrowser(t), newFleet(t, 4)
	b.call("Page.navigate", map[string]any{"url": f.url}, nil)
	b.until(`document.activeElement?.id === "token"`)
	eval[any](b, `document.querySelector("#token").value = "wrong"`)
	eval[any](b, `document.querySelector("#login-form button").click()`)
	b.until(`document.querySelector("#login-fault").textContent.includes("not that of this node")`)
	b.open(f.url, fleetToken)
	where := eval[string](b, `location.href + document.cookie + JSON.stringify(localStorage) +
		performance.getEntriesByType("resource").map(e => e.name).join()`)
	assert.NotContains(t, where, fleetToken)
	assert.Equal(t, 1, eval[int](b, `sessionStorage.length`))
	assert.Empty(t, eval[string](b, `document.querySelector("#login input").value`))
}

// CC32: 256 ranks and 10,000 events stay usable, and text from outside stays text.
func TestALargeFleet(t *testing.T) {
	b, f := newBrowser(t), newFleet(t, 256)
	b.look(1440, 900, "light")
	b.open(f.url, fleetToken)
	b.until(`document.querySelectorAll("#ranks-table tbody tr").length === 256`)
	assert.Contains(t, eval[string](b, `document.querySelector("#rank-sum").textContent`), "254 ready")
	eval[any](b, `document.querySelector("#rank-bad").click()`)
	b.until(`document.querySelectorAll("#ranks-table tbody tr").length === 2`)
	eval[any](b, `document.querySelector("#rank-bad").click()`)

	for range 10_000 {
		f.happen("<img src=x onerror=alert(1)>")
	}
	b.until(`document.querySelector("#events-table tbody th + td + td")?.textContent === "demo/0/9"`)
	assert.LessOrEqual(t, eval[int](b, `document.querySelectorAll("#events-table tbody tr").length`), 300)

	eval[any](b, `document.querySelector("#log-follow").click()`)
	b.until(`document.querySelector("#log-lines").textContent.includes("<script>")`)
	assert.Zero(t, eval[int](b, `document.querySelectorAll("main img, main script").length`))

	took := eval[float64](b, `new Promise(done => {
		const t = performance.now(); document.querySelector("#rank-filter").value = "0/17";
		document.querySelector("#rank-filter").dispatchEvent(new Event("input"));
		requestAnimationFrame(() => done(performance.now() - t)); })`)
	paint := eval[float64](b, `performance.getEntriesByName("first-contentful-paint")[0].startTime`)
	t.Logf("first paint %.0f ms, filter of 256 ranks to the next frame %.0f ms", paint, took)
	b.until(`document.querySelectorAll("#ranks-table tbody tr").length === 11`) // 0/17, 0/170 to 0/179
}

// CC32: axe-core finds nothing, in light and dark, wide and on a phone, and the keyboard reaches the content.
func TestAccessibility(t *testing.T) {
	folder := filepath.Join(os.Getenv("DPSERVE_PAGE"), "node_modules", "axe-core")
	axe, err := os.ReadFile(filepath.Join(folder, "axe.min.js"))
	require.NoError(t, err, "test/page/install.sh installs it")
	b, f := newBrowser(t), newFleet(t, 16)
	check := func(what string) {
		b.call("Runtime.evaluate", map[string]any{"expression": string(axe)}, nil)
		found := eval[[]string](b, `axe.run(document).then(r => r.violations.flatMap(v =>
			v.nodes.map(n => v.id + " " + n.target + " " + n.failureSummary)))`)
		assert.Empty(t, found, what)
	}
	b.call("Page.navigate", map[string]any{"url": f.url}, nil)
	b.until(`document.activeElement?.id === "token"`)
	check("the form of the token")
	b.open(f.url, fleetToken)
	eval[any](b, `document.querySelector("#explain-form textarea").value = "Hello"`)
	eval[any](b, `document.querySelector("#explain-form button").click()`)
	b.until(`document.querySelectorAll("#terms-table tr.picked").length === 1`)
	for _, colours := range []string{"light", "dark"} {
		b.look(1440, 900, colours)
		check(colours)
		b.look(390, 844, colours)
		check(colours + " on a phone")
	}
	b.call("Page.navigate", map[string]any{"url": f.url}, nil)
	b.until(`document.querySelector("#live")?.textContent === "live"`)
	b.call("Input.dispatchKeyEvent", map[string]any{
		"type": "keyDown", "key": "Tab", "code": "Tab",
		"windowsVirtualKeyCode": 9,
	}, nil)
	assert.Equal(t, "skip", eval[string](b, `document.activeElement.className`))
}
