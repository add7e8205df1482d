package api

import (
	"embed"
	"net/http"
	"path"
	"strings"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/internal/problem"
)

// pageFiles is the page for people: it shows what this API answers to it. The files hold no facts of the
// node, so they need no token.
//
//go:embed page
var pageFiles embed.FS

// pagePolicy allows the page what it needs: its own files, and calls of this port. No page may frame it.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// pageTypes are the kinds of files of the page.
var pageTypes = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// isPagePath reports whether a path is of the page's files.
func isPagePath(path string) bool { return path == pathPage || strings.HasPrefix(path, pathPageFiles) }

// addPageRoutes registers the page.
func addPageRoutes(g *gin.Engine) {
	g.GET(pathPage, func(c *gin.Context) { servePageFile(c, "index.html") })
	g.GET(pathPageFiles+":file", func(c *gin.Context) { servePageFile(c, c.Param("file")) })
}

// servePageFile sends a file of the page. A query is refused, so that no link with a token in it ever works.
func servePageFile(c *gin.Context, name string) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		WriteError(c.Writer, err)
		return
	}
	text, err := pageFiles.ReadFile("page/" + name)
	if err != nil {
		WriteError(c.Writer, problem.New(problem.NotFound, "the page has no file %q", truncateText(name)).
			WithHint("the page is /"))
		return
	}
	h := c.Writer.Header()
	h.Set("Content-Security-Policy", pagePolicy)
	h.Set("Referrer-Policy", "no-referrer")
	c.Data(http.StatusOK, pageTypes[path.Ext(name)], text)
}
