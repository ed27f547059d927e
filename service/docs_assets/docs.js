// A file of its own, since the page's content security policy allows no script inside the page.
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  persistAuthorization: false, // a key is never stored
  tryItOutEnabled: true,
  validatorUrl: null, // the default sends the document's address to swagger.io
});
